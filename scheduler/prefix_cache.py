"""Which full pages hold which tokens, so that a shared prefix is computed once.

Knows tokens, and names pages by them.  Who owns a page and when it is evicted is the block
pool's business.
"""

from __future__ import annotations

from array import array
from hashlib import sha256
from itertools import islice

from scheduler.block_pool import BlockPool
from scheduler.sequence import Sequence


class PrefixCache:
    """Finds and keeps pages by the tokens from the start of the sequence to the page's end.

    The keys and values of a token depend on all tokens before it, so a page is named by a chain:
    key = sha256(key of the page before, the page's tokens), and the chain starts from the
    sequence's `cache_salt`.  Only full pages have a key; they are never written again, so any
    number of sequences can read them (PagedAttention, SOSP '23, section 4.4, where sharing is by
    explicit prefix; a chain of hashes finds it without being told).
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._page_size = pool.page_size

    def match(self, seq: Sequence) -> list[int]:
        """Pages of the longest cached prefix of `seq`.

        At least one token is left to compute, because the next one is sampled from its logits.
        """
        pages: list[int] = []
        most = (len(seq.token_ids) - 1) // self._page_size
        for key in islice(self._keys(seq, most), most):
            page = self._pool.find(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def keep(self, seq: Sequence, start: int, end: int) -> None:
        """Keep the pages of `seq` that its tokens `start` to `end`, now computed, have filled."""
        first, last = start // self._page_size, end // self._page_size
        if first == last:
            return
        keys = self._keys(seq, last)
        for index in range(first, last):
            self._pool.keep(seq.block_table[index], keys[index])

    def clear(self) -> None:
        """Forget all content, as new weights require."""
        self._pool.forget_keys()

    def _keys(self, seq: Sequence, num_pages: int) -> list[bytes]:
        """Keys of at least the first `num_pages` pages; each is computed once per sequence."""
        keys, size = seq.page_keys, self._page_size
        while len(keys) < num_pages:
            parent = keys[-1] if keys else sha256(seq.cache_salt).digest()
            first = len(keys) * size
            tokens = array("q", seq.token_ids[first : first + size])
            keys.append(sha256(parent + tokens.tobytes()).digest())
        return keys

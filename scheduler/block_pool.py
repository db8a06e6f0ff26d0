"""Who owns which page: free list, reference counts, and pages kept for their content.

Knows page numbers and opaque content keys.  The pages themselves live on the device, and what
a key means is the prefix cache's business.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

NULL_PAGE = 0
"""The page that padding writes to.  It is never allocated."""


class BlockPool:
    """Hands out pages of the KV cache (PagedAttention, SOSP '23, section 4.3).

    Every page but the null page is in one of three states:

    - free: no owner, and its content is of no use;
    - held: in the block table of one owner or more;
    - cached: no owner, but its content has a key, by which `find` may hand it out again.

    A cached page is also a free one: `allocate` takes the least recently used when there are
    no others, and its key is forgotten.  Each method takes time linear in the pages named.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Start with every page free.

        Args:
            num_pages: pages of the cache, the null page included; at least 2.
            page_size: token positions of a page; at least 1.

        Raises:
            ValueError: either is too small.
        """
        if num_pages < 2:
            raise ValueError(
                f"num_pages={num_pages} must be at least 2: the null page and one to hand out"
            )
        if page_size < 1:
            raise ValueError(f"page_size={page_size} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self._num_owners = [0] * num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def capacity(self) -> int:
        """Token positions of all pages together."""
        return (self.num_pages - 1) * self.page_size

    @property
    def num_free(self) -> int:
        """Pages that can be allocated: the free and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages without an owner that are kept for their content."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages that have an owner."""
        return self.num_pages - 1 - self.num_free

    def num_missing(self, block_table: Sequence[int], num_tokens: int) -> int:
        """Pages that a table lacks to hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size) - len(block_table)

    def allocate(self, count: int) -> list[int]:
        """Give `count` pages of no particular content to one owner; at most `num_free`."""
        assert count <= self.num_free, f"{count} pages asked for, {self.num_free} are free"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._num_owners[page] = 1
        return pages

    def find(self, key: bytes) -> int | None:
        """The page whose content has `key`, held or cached; None if there is none."""
        return self._page_of.get(key)

    def share(self, pages: Iterable[int]) -> None:
        """Give held or cached pages one more owner, which may read them but not write."""
        for page in pages:
            if self._num_owners[page] == 0:
                del self._cached[page]
            self._num_owners[page] += 1

    def release(self, block_table: Sequence[int]) -> None:
        """Take one owner from each page of a table.

        The last page of the table goes first: a page of a prefix is of no use without those
        before it, so of one table the later pages must be evicted before the earlier ones.
        """
        for page in reversed(block_table):
            self._num_owners[page] -= 1
            if self._num_owners[page] == 0:
                self._retire(page)

    def num_free_beside(self, pages: Iterable[int]) -> int:
        """Pages that could still be allocated if `pages` were shared."""
        return self.num_free - sum(self._num_owners[page] == 0 for page in pages)

    def keep(self, page: int, key: bytes) -> None:
        """Name the content of a held page.  If another page has it already, that one stays."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def forget_keys(self) -> None:
        """Forget what every page contains."""
        self._page_of.clear()
        self._key_of.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that `block_tables` own exactly the held pages, and that no page is lost."""
        owners = Counter(page for table in block_tables for page in table)
        assert NULL_PAGE not in owners, "the null page is in a block table"
        for page, count in enumerate(self._num_owners):
            assert count == owners[page], f"page {page}: {count} owners, in {owners[page]} tables"
        unowned = [*self._free, *self._cached]
        total = self.num_pages - 1
        assert len({*unowned, *owners}) == len(unowned) + len(owners) == total, (
            f"{len(self._free)} free + {len(owners)} held + {len(self._cached)} cached pages "
            f"are not the {total} of the pool"
        )
        assert self._page_of == {key: page for page, key in self._key_of.items()}
        assert self._key_of.keys() >= self._cached.keys(), "a cached page has no key"
        assert self._key_of.keys().isdisjoint(self._free), "a free page has a key"

    def _retire(self, page: int) -> None:
        if page in self._key_of:
            self._cached[page] = None
        else:
            self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

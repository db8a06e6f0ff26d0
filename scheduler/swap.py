"""Preemption by swap: a sequence's pages go to the host and come back, instead of being recomputed.

Knows what moving a page costs beside computing its tokens anew.  Does not know whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from scheduler.sequence import Sequence
from scheduler.swap_space import PageCopy, SwapSpace

Preemption = Literal["recompute", "swap", "auto"]


class Swapper:
    """Decides who is swapped, and keeps what was (vLLM, SOSP '23, section 4.5).

    A swapped sequence goes on where it was: as if all that it had computed were a prefix found in
    the cache.  One that is not swapped, because that costs more or the space is full, is computed
    anew.
    """

    def __init__(self, preemption: Preemption, page_cost_tokens: float, space: SwapSpace) -> None:
        """Hold nothing.

        Args:
            preemption: never, always or where it is estimated to cost less.
            page_cost_tokens: tokens that are computed in the time in which one page travels out
                and back.
            space: the host pages; the swapper is their only owner.
        """
        self._preemption = preemption
        self._page_cost_tokens = page_cost_tokens
        self._space = space

    def save(self, seq: Sequence) -> tuple[PageCopy, ...]:
        """The copy, if any, that keeps a running sequence's pages; to run before they are reused.

        Pages of steps in flight are among them: those steps come before the copy.
        """
        pages = tuple(seq.block_table)
        if not self._is_better(seq, len(pages)) or len(pages) > self._space.num_free:
            return ()
        seq.host_pages = self._space.allocate(len(pages))
        seq.num_swapped = seq.num_computed
        return (PageCopy(pages, tuple(seq.host_pages)),)

    def restore(self, seq: Sequence, num_held: int) -> tuple[PageCopy, ...]:
        """The copy, if any, that brings pages back into the sequence's new block table.

        The first `num_held` pages of the table have their content already.
        """
        used = len(seq.block_table)
        pages, host_pages = seq.block_table[num_held:], seq.host_pages[num_held:used]
        self.drop(seq)
        return (PageCopy(tuple(pages), tuple(host_pages)),) if num_held < used else ()

    def drop(self, seq: Sequence) -> None:
        """Forget what was saved of a sequence."""
        self._space.release(seq.host_pages)
        seq.host_pages = []
        seq.num_swapped = 0

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Assert that the sequences that wait hold the host pages, and nobody else."""
        seqs = list(waiting)
        self._space.check(seq.host_pages for seq in seqs)
        for seq in seqs:
            assert (seq.num_swapped > 0) == bool(seq.host_pages)

    def _is_better(self, seq: Sequence, num_pages: int) -> bool:
        if self._preemption == "recompute" or seq.is_stale or seq.num_left == 0:
            return False
        cost = num_pages * self._page_cost_tokens
        return self._preemption == "swap" or cost < seq.num_computed

"""Sequences in order of seniority: those that run, and those that wait.

Knows ranks only.  How a rank comes about is the policy's business, and who shares with whom is
that of `fair_share.py`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Protocol

from scheduler.sequence import Rank, Sequence

_rank: Callable[[Sequence], Rank] = attrgetter("rank")


class SeniorityQueue:
    """The sequences that run, in order of rank: few, and read from end to end at every step."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    @property
    def first(self) -> Sequence:
        """The most senior sequence."""
        return self._seqs[0]

    @property
    def last(self) -> Sequence:
        """The least senior sequence."""
        return self._seqs[-1]

    def add(self, seq: Sequence) -> None:
        """Put `seq` in the place that its rank gives it."""
        insort(self._seqs, seq, key=_rank)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out."""
        index = bisect_left(self._seqs, seq.rank, key=_rank)
        assert self._seqs[index] is seq, f"sequence {seq.seq_id!r} is not in this queue"
        del self._seqs[index]


class WaitingQueue(Protocol):
    """The sequences that wait: any number, of which one is asked for, the next to be admitted."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, the most senior first; costs as much as to sort them."""
        ...

    @property
    def first(self) -> Sequence:
        """The next to be admitted; there must be one."""
        ...

    def add(self, seq: Sequence) -> None:
        """Let `seq` wait."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, first or not."""
        ...

    def rank_of_admitted(self, seq: Sequence) -> Rank:
        """The rank that a sequence which was just removed runs with."""
        ...

    def serve(self, key: str, prompt_tokens: int, output_tokens: int) -> None:
        """Told what a key is being given."""
        ...

    def check(self) -> None:
        """Assert the queue's own invariants."""
        ...


class RankHeap:
    """Waiting sequences, the most senior first, in time logarithmic in their number.

    What was removed from the middle stays in the heap until it comes to its top, or until most of
    the heap is such.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Sequence]] = []
        self._tickets: dict[Sequence, int] = {}  # of those that wait, and of no others
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._tickets, key=_rank))

    @property
    def first(self) -> Sequence:
        """The most senior sequence."""
        return self._heap[0][2]

    def add(self, seq: Sequence) -> None:
        """Let `seq` wait; its rank must stay as it is until it is removed."""
        assert seq not in self._tickets, f"sequence {seq.seq_id!r} waits already"
        self._num_added += 1
        self._tickets[seq] = self._num_added
        heapq.heappush(self._heap, (seq.rank, self._num_added, seq))

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, first or not."""
        assert seq in self._tickets, f"sequence {seq.seq_id!r} is not in this queue"
        del self._tickets[seq]
        while self._heap and self._is_gone(self._heap[0]):
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._tickets) + 16:
            self._heap = [item for item in self._heap if not self._is_gone(item)]
            heapq.heapify(self._heap)

    def rank_of_admitted(self, seq: Sequence) -> Rank:
        """The one it waited with."""
        return seq.rank

    def serve(self, key: str, prompt_tokens: int, output_tokens: int) -> None:
        """Nothing to remember."""

    def check(self) -> None:
        """Assert that the heap has everybody once, with the rank that it has now."""
        there = {seq: rank for rank, ticket, seq in self._heap if self._tickets.get(seq) == ticket}
        assert there == {seq: seq.rank for seq in self._tickets}
        assert not self._tickets or self.first is next(iter(self))

    def _is_gone(self, item: tuple[Rank, int, Sequence]) -> bool:
        return self._tickets.get(item[2]) != item[1]

"""Who goes first, and who may join: the choices in which serving systems differ.

Knows nothing of tokens, pages or budgets.  The only clock is the one that `Dynamic` is given.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Literal, Protocol

from scheduler.sequence import Sequence

Policy = Literal["fcfs", "priority"]

_rank: Callable[[Sequence], tuple[int, int]] = attrgetter("rank")


def rank(policy: Policy, seq: Sequence, arrival: int) -> tuple[int, int]:
    """Seniority of a sequence, smallest first: by arrival, or by priority and then arrival."""
    return (seq.priority if policy == "priority" else 0, arrival)


class SeniorityQueue:
    """Sequences in order of rank, the most senior first."""

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


class AdmissionPolicy(Protocol):
    """Decides whether a waiting sequence may join those that run."""

    def may_admit(self, num_running: int, num_waiting: int, num_free_slots: int) -> bool:
        """Whether one more may join now.  Asked before each admission, also when none waits."""
        ...

    def on_admitted(self) -> None:
        """Called after each sequence that joined."""
        ...


class Continuous:
    """A sequence joins as soon as there is room (iteration-level scheduling, Orca, OSDI '22)."""

    def may_admit(self, num_running: int, num_waiting: int, num_free_slots: int) -> bool:
        """Always."""
        return True

    def on_admitted(self) -> None:
        """Nothing to remember."""


class Static:
    """A batch starts when the last one has fully ended, with those that wait at that moment."""

    def __init__(self) -> None:
        self._num_places = 0

    def may_admit(self, num_running: int, num_waiting: int, num_free_slots: int) -> bool:
        """Until the batch has its size; a slot that becomes free before its end stays empty."""
        if num_running == 0:
            self._num_places = min(num_waiting, num_free_slots)
        return self._num_places > 0

    def on_admitted(self) -> None:
        """One place of the batch is taken."""
        self._num_places -= 1


class Dynamic(Static):
    """A static batch that first waits for company: for a time, or until it fills the slots."""

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        """Wait with each batch.

        Args:
            window_s: seconds that a batch is collected, from when a sequence waits and none runs.
            clock: the time in seconds; `time.monotonic`, or a simulator's virtual time.
        """
        super().__init__()
        self._window_s = window_s
        self._clock = clock
        self._opened_s: float | None = None

    def may_admit(self, num_running: int, num_waiting: int, num_free_slots: int) -> bool:
        """As `Static`, but a batch starts only when it is full or its window has passed."""
        collecting = num_running == 0 and num_waiting < num_free_slots
        if collecting and not self._window_has_passed(num_waiting):
            return False
        self._opened_s = None
        return super().may_admit(num_running, num_waiting, num_free_slots)

    def _window_has_passed(self, num_waiting: int) -> bool:
        if num_waiting == 0:
            self._opened_s = None
            return False
        now = self._clock()
        if self._opened_s is None:
            self._opened_s = now
        return now - self._opened_s >= self._window_s

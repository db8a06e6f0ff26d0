"""Who goes first, and who may join: the choices in which serving systems differ.

Knows nothing of tokens, pages or budgets.  The only clock is the one that `Dynamic` is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from scheduler.sequence import Sequence

Policy = Literal["fcfs", "priority"]


def precedence(policy: Policy, seq: Sequence, now_s: float, ageing_s: float | None) -> float:
    """What goes before the order of arrival in a sequence's rank, smallest first.

    With ageing a sequence gains one priority level per `ageing_s` seconds of waiting, evenly.  All
    that wait gain alike, so their order never changes: at any time t, `priority - (t - arrival) /
    ageing_s` orders them as `arrival + ageing_s * priority` does, which is known on arrival.

    Args:
        policy: whether priorities count at all.
        seq: gives its priority, lower first.
        now_s: the time of its arrival.
        ageing_s: seconds per level; never if absent.
    """
    if policy == "fcfs":
        return 0
    return seq.priority if ageing_s is None else now_s + ageing_s * seq.priority


class AdmissionPolicy(Protocol):
    """Decides whether a waiting sequence may join those that run."""

    def may_admit(self, num_running: int, num_waiting: int, num_free_slots: int) -> bool:
        """Whether one more may join now.  Asked before each admission, also when none waits."""
        ...

    def on_admitted(self) -> None:
        """Called after each sequence that joined."""
        ...

    def on_preempted(self) -> None:
        """Called after each sequence that lost its slot and waits again."""
        ...

    @property
    def wait_s(self) -> float:
        """Seconds until time alone may change the answer; 0.0 if it cannot."""
        ...


class Continuous:
    """A sequence joins as soon as there is room (iteration-level scheduling, Orca, OSDI '22)."""

    wait_s = 0.0

    def may_admit(self, num_running: int, num_waiting: int, num_free_slots: int) -> bool:
        """Always."""
        return True

    def on_admitted(self) -> None:
        """Nothing to remember."""

    def on_preempted(self) -> None:
        """Nothing to remember."""


class Static:
    """A batch starts when the last one has fully ended, with those that wait at that moment."""

    def __init__(self) -> None:
        self._num_places = 0

    @property
    def wait_s(self) -> float:
        """No time is waited for."""
        return 0.0

    def may_admit(self, num_running: int, num_waiting: int, num_free_slots: int) -> bool:
        """Until the batch has its size; a slot that becomes free before its end stays empty."""
        # With places left the batch is still being placed, over several steps.
        if num_running == 0 and (self._num_places == 0 or num_waiting == 0):
            self._num_places = min(num_waiting, num_free_slots)
        return self._num_places > 0

    def on_admitted(self) -> None:
        """One place of the batch is taken."""
        self._num_places -= 1

    def on_preempted(self) -> None:
        """Who lost its slot is still of the batch."""
        self._num_places += 1


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
        self._closes_s: float | None = None

    @property
    def wait_s(self) -> float:
        """Seconds until the open window has passed."""
        return 0.0 if self._closes_s is None else max(self._closes_s - self._clock(), 0.0)

    def may_admit(self, num_running: int, num_waiting: int, num_free_slots: int) -> bool:
        """As `Static`, but a batch starts only when it is full or its window has passed."""
        is_new = num_running == 0 and self._num_places == 0
        collecting = is_new and num_waiting < num_free_slots
        if collecting and not self._window_has_passed(num_waiting):
            return False
        self._closes_s = None
        return super().may_admit(num_running, num_waiting, num_free_slots)

    def _window_has_passed(self, num_waiting: int) -> bool:
        if num_waiting == 0:
            self._closes_s = None
            return False
        now = self._clock()
        if self._closes_s is None:
            self._closes_s = now + self._window_s
        return now >= self._closes_s

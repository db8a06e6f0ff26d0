"""How much a step may do so that a latency bound holds.

Knows a model of step times.  Does not know which sequences it is about.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.plan import StepPlan
from scheduler.queues import SeniorityQueue
from scheduler.sequence import Sequence
from scheduler.step_time import StepCost, StepWork

_GROWTH = 2
"""A model of times is asked about at most so many times what it has seen: far from what was
measured it says little, and of the first steps nothing."""


class Unbounded:
    """No limits."""

    def saw(self, plan: StepPlan) -> None:
        """Nothing to remember."""

    def may_join(self, seq: Sequence, running: SeniorityQueue) -> bool:
        """Always."""
        return True

    def max_chunk(self, rows: int, num_waiting: int, running: SeniorityQueue, most: int) -> int:
        """All that there is room for."""
        return most

    def max_steps(self, rows: int, running: SeniorityQueue, most: int) -> int:
        """All that are asked for."""
        return most


@dataclass(slots=True)
class LatencyBound:
    """Limits of the next step, from what it would take.

    The time per output token is held by the sequences that run and by the prompt tokens beside
    them: both are as many as keep a step within it (chunks of a size chosen by the bound on the
    time between tokens: Sarathi-Serve, OSDI '24, section 4.3).  The time to the first token is
    held by giving prefills all that this leaves, and by dispatches after which an arrival need
    not wait long.

    It never stops the work: one sequence may always run, and a least chunk always advance.
    """

    cost: StepCost
    tpot_s: float | None
    """Bound on the time per output token."""
    ttft_s: float | None
    """Bound on the time to the first token."""
    least_chunk: int
    """Prompt tokens of a step that are always allowed."""
    _most_rows: int = 1
    _most_chunk: int = 0

    def saw(self, plan: StepPlan) -> None:
        """The results of a plan are back, so that its time can be known."""
        if chunk := plan.num_chunk_tokens:
            self._most_chunk = max(self._most_chunk, chunk)
        else:
            self._most_rows = max(self._most_rows, len(plan.entries))

    def may_join(self, seq: Sequence, running: SeniorityQueue) -> bool:
        """Whether a sequence may run beside those that do."""
        num_seqs = len(running) + 1
        if self.tpot_s is None or num_seqs == 1:
            return True
        kv_tokens = _num_computed(running) + seq.num_tokens
        work = StepWork(rows=num_seqs, chunk_tokens=0, kv_tokens=kv_tokens, num_seqs=num_seqs)
        return num_seqs <= _GROWTH * self._most_rows and self.cost.seconds(work) <= self.tpot_s

    def max_chunk(self, rows: int, num_waiting: int, running: SeniorityQueue, most: int) -> int:
        """Most prompt tokens of a step with decoding sequences, of the `most` that it has room for.

        Args:
            rows: sequences that decode in the step.
            num_waiting: sequences that decode and must wait for this step.
            running: all that run.
            most: at least 0.
        """
        if self.tpot_s is None or rows + num_waiting == 0:
            return most
        least = min(self.least_chunk, most)
        most = min(most, max(_GROWTH * self._most_chunk, least))
        kv_tokens = _num_computed(running)
        # The largest that keeps the bound; its time grows with its size.
        size = most  # often all of it
        while least < most:
            work = StepWork(
                rows=rows, chunk_tokens=size, kv_tokens=kv_tokens + size, num_seqs=rows + 1
            )
            if self.cost.seconds(work) <= self.tpot_s:
                least = size
            else:
                most = size - 1
            size = (least + most + 1) // 2
        return least

    def max_steps(self, rows: int, running: SeniorityQueue, most: int) -> int:
        """Most decode steps of a dispatch: an arrival may have to wait for two dispatches, and
        that shall take no more than half of its time to the first token."""
        if self.ttft_s is None:
            return most
        kv_tokens = _num_computed(running)
        work = StepWork(rows=rows, chunk_tokens=0, kv_tokens=kv_tokens, num_seqs=rows)
        step_s = self.cost.seconds(work)
        return most if step_s <= 0 else max(1, min(most, int(self.ttft_s / (4 * step_s))))


def _num_computed(running: SeniorityQueue) -> int:
    """Keys that a step of all running sequences reads."""
    return sum(seq.num_computed for seq in running)

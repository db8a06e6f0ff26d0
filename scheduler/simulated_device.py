"""A device in virtual time: it takes as long as a cost model says, and makes its tokens up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler.plan import ScheduledTokens, StepPlan
from scheduler.sequence import Sequence
from scheduler.step_time import Buckets, StepCost, StepWork

TOKEN, STOP = 0, 1
"""What it samples: a token that ends nothing, and one that does."""


@dataclass(slots=True)
class Flight:
    """A plan on the device: what it will have sampled, and when it will be done."""

    plan: StepPlan
    work: StepWork
    tokens: list[list[int]]
    start_s: float
    seconds: float

    @property
    def done_s(self) -> float:
        """When it will be done."""
        return self.start_s + self.seconds


class Device:
    """Runs plans in order, each for the time that the cost model says."""

    def __init__(self, cost: StepCost, multi_step: int, buckets: Buckets) -> None:
        """Idle.

        Args:
            cost: how long it takes for a plan.
            multi_step: most decode steps of one dispatch.
            buckets: the sizes that steps are padded to.
        """
        self._cost = cost
        self._multi_step = multi_step
        self._buckets = buckets
        self._free_s = 0.0
        self._num_sampled: dict[Sequence, int] = {}

    def run(self, plan: StepPlan, now_s: float, ends: dict[Sequence, int]) -> Flight:
        """Start a plan as soon as the one before is done.

        Args:
            plan: to run.
            now_s: when the host has it ready.
            ends: the number of output tokens after which a token ends each sequence.
        """
        tokens = [self._sample(entry, ends) for entry in plan.entries]
        start_s = max(now_s, self._free_s)
        work = self._work(plan, tokens)
        seconds = self._cost.seconds(work)
        self._free_s = start_s + seconds
        return Flight(plan, work, tokens, start_s, seconds)

    def padded_tokens(self, work: StepWork) -> int:
        """Rows that it computes in all iterations."""
        return work.num_steps * sum(self._buckets.pad(work))

    def _work(self, plan: StepPlan, tokens: list[list[int]]) -> StepWork:
        """The plan's work, with the iterations that run.

        A device that repeats the decode step by itself stops with its last row.
        """
        work = StepWork.of(plan)
        if self._multi_step == 1 or plan.num_chunk_tokens > 0:
            return work
        return replace(work, num_steps=max(map(len, tokens)))

    def _sample(self, entry: ScheduledTokens, ends: dict[Sequence, int]) -> list[int]:
        """The tokens of an entry: none after the one that ended its sequence."""
        seq = entry.seq
        before = self._num_sampled.get(seq, 0)
        # A sequence that was preempted computes its tokens anew but samples only the next one.
        count = max(min(entry.num_samples, ends[seq] - before), 0)
        self._num_sampled[seq] = before + count
        tokens = [TOKEN] * count
        if 0 < count == ends[seq] - before and ends[seq] < seq.max_tokens:
            tokens[-1] = STOP
        return tokens

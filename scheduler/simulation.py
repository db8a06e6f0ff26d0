"""What a simulation has found out: its requests, its steps, and how the cache was used.

Does not know the loop that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from scheduler.residents import SchedulerStats
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.step_time import StepWork
from scheduler.summary import Bounds, over, summarise
from scheduler.trace import Arrival

Phase = Literal["prefill", "decode"]


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """What became of one arrival; times in seconds of virtual time."""

    arrival: Arrival
    seq: Sequence
    start_s: float | None = None
    """When the step in which it first had a slot was scheduled."""
    token_times_s: list[float] = field(default_factory=list)
    """When the host knew each output token; those of one dispatch at the same time."""

    @property
    def finish_s(self) -> float | None:
        """When its last token was known; None if it is still running."""
        return self.token_times_s[-1] if self.seq.finish_reason is not None else None

    @property
    def queue_s(self) -> float | None:
        """From arrival to the first slot."""
        return None if self.start_s is None else self.start_s - self.arrival.time_s

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return self.token_times_s[0] - self.arrival.time_s if self.token_times_s else None

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the last token."""
        return None if self.finish_s is None else self.finish_s - self.arrival.time_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between successive tokens."""
        times = self.token_times_s
        return [after - before for before, after in pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean gap; None with one token."""
        num_gaps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / num_gaps if num_gaps > 0 else None


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One dispatch: the plan's work, when it ran, and what the scheduler held just then."""

    start_s: float
    seconds: float
    work: StepWork
    """With the iterations that ran."""
    padded_tokens: int
    """Rows that the model computed, those without a token among them."""
    tokens: int
    """Rows with a token."""
    waiting: int
    free_pages: int
    held_pages: int
    preempted: tuple[str, ...]
    """Sequences that lost their slots to it."""
    slots: tuple[tuple[int, str, Phase], ...]
    """Who held which slot, the slots in order; empty if that was not to be recorded."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a line of JSON."""
        return {
            "start_s": self.start_s,
            "seconds": self.seconds,
            "rows": self.work.rows,
            "chunk_tokens": self.work.chunk_tokens,
            "kv_tokens": self.work.kv_tokens,
            "num_steps": self.work.num_steps,
            "padded_tokens": self.padded_tokens,
            "tokens": self.tokens,
            "waiting": self.waiting,
            "free_pages": self.free_pages,
            "held_pages": self.held_pages,
            "preempted": list(self.preempted),
            "slots": [list(slot) for slot in self.slots],
        }


@dataclass(slots=True)
class KVUse:
    """Sums over the iterations of all steps, for the sequences that have a slot."""

    seqs: int = 0
    used_tokens: int = 0
    """Tokens whose keys and values are there."""
    table_tokens: int = 0
    """Positions of the pages in their block tables; a shared page counts for each holder."""
    reserved_tokens: int = 0
    """Positions they would hold if each had `max_model_len` of its own."""
    held_pages: int = 0
    """Pages with an owner; a shared page counts once."""

    def waste(self) -> dict[str, float | None]:
        """Which share of what sequences hold is not in use.

        `kv_waste_if_reserved` is that share for a server that reserves `max_model_len` for each.
        """
        return {
            "kv_waste": over(self.table_tokens - self.used_tokens, self.table_tokens),
            "kv_waste_tokens_per_seq": over(self.table_tokens - self.used_tokens, self.seqs),
            "kv_waste_if_reserved": over(
                self.reserved_tokens - self.used_tokens, self.reserved_tokens
            ),
        }

    def count(self, scheduler: Scheduler, num_steps: int) -> None:
        """Count the state that a plan of so many iterations leaves."""
        page_size = scheduler.pool.page_size
        for seq in scheduler.running:
            self.used_tokens += num_steps * seq.num_computed
            self.table_tokens += num_steps * len(seq.block_table) * page_size
        self.seqs += num_steps * scheduler.num_running
        self.reserved_tokens += num_steps * scheduler.num_running * scheduler.config.max_model_len
        self.held_pages += num_steps * scheduler.pool.num_held


@dataclass(frozen=True, slots=True)
class Simulation:
    """All that happened."""

    requests: tuple[SimulatedRequest, ...]
    """In order of arrival."""
    steps: tuple[SimulatedStep, ...]
    """In order of dispatch."""
    wall_s: float
    """From second 0 to the last token."""
    num_slots: int
    num_pages: int
    """Of the pool, without the null page."""
    kv: KVUse
    stats: SchedulerStats
    bounds: Bounds

    def summary(self) -> dict[str, Any]:
        """The figures of `jaxserve bench throughput`, and those that only a simulator has."""
        return summarise(self)

    def step_lines(self) -> Iterator[dict[str, Any]]:
        """The per-step trace as plain data."""
        return (step.to_dict() for step in self.steps)

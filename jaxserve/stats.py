"""Counts and times of the engine's steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jaxserve.shapes import StepShape
from scheduler import StepPlan


@dataclass(frozen=True)
class EngineStats:
    """A snapshot since the last reset; times in seconds, `None` where nothing was measured."""

    steps: int
    """Device iterations."""
    prompt_tokens: int
    """Prompt tokens of the requests submitted."""
    output_tokens: int
    slot_utilisation: float | None
    """Output tokens per slot and step."""
    padded_share: float | None
    """Share of the model rows computed that held no token."""
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    compilations_after_ready: int
    """Compile events of the whole process since the engine was ready."""
    host_s_per_step: float | None
    """Time of a step in which the host was not waiting for the device."""
    step_s: float | None
    """Mean time from one step's report to the next."""
    steps_by_shape: dict[str, int]


@dataclass
class StepMeter:
    """Accumulates what `EngineStats` reports."""

    num_slots: int
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    host_s: float = 0.0
    busy_s: float = 0.0
    by_shape: dict[str, int] = field(default_factory=dict)

    def count(self, plan: StepPlan, shape: StepShape) -> None:
        """Count a dispatched step."""
        self.steps += 1
        self.rows += shape.tokens
        self.tokens += plan.num_decode_tokens + plan.num_chunk_tokens
        self.by_shape[str(shape)] = self.by_shape.get(str(shape), 0) + 1

    def add_time(self, total_s: float, waited_s: float) -> None:
        """Add one turn of the engine's loop."""
        self.busy_s += total_s
        self.host_s += total_s - waited_s

    @property
    def slot_utilisation(self) -> float | None:
        """Output tokens per slot and step."""
        return self.output_tokens / (self.steps * self.num_slots) if self.steps else None

    @property
    def padded_share(self) -> float | None:
        """Share of rows without a token."""
        return 1 - self.tokens / self.rows if self.rows else None


class Stopwatch:
    """Time of one turn of the loop, and how much of it was spent waiting for the device."""

    def __init__(self) -> None:
        """Start."""
        self._start = time.perf_counter()
        self.waited_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start

    def __enter__(self) -> Stopwatch:
        """Begin to wait."""
        self._wait_start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """End the wait."""
        self.waited_s += time.perf_counter() - self._wait_start

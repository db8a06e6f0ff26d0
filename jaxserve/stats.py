"""Counts and times of the engine's steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.shapes import StepShape
from scheduler import StepPlan


@dataclass(frozen=True)
class EngineStats:
    """A snapshot since the last reset; times in seconds, `None` where nothing was measured."""

    steps: int
    """Device iterations."""
    dispatches: int
    """Calls of an executable; one may run several decode steps."""
    prompt_tokens: int
    """Prompt tokens of the requests submitted."""
    output_tokens: int
    slot_utilisation: float | None
    """Output tokens per slot and step."""
    padded_share: float | None
    """Share of the model rows computed that held no token."""
    discarded_tokens: int
    """Tokens that were sampled after what ended their sequence."""
    preemptions: int
    swaps: int
    """Preemptions whose pages were kept on the host."""
    prefix_query_tokens: int
    prefix_hit_tokens: int
    compilations_after_ready: int
    """Compile events of the whole process since the engine was ready."""
    host_s_per_step: float | None
    """Time of a step in which the host was not waiting for the device."""
    host_s_by_phase: dict[str, float]
    """That time, of all steps, by what the host did: schedule, admit, pack, dispatch, masks (that
    constraints put on the tokens, where steps run in halves; where a step asks for them, that is
    part of the step), update, and output (text, log-probabilities, times)."""
    step_s: float | None
    """Mean time from one step's report to the next."""
    steps_by_shape: dict[str, int]
    num_in_bounds: int | None = None
    """Requests that met the latency bounds; None without any."""
    elapsed_s: float | None = None
    """From the first turn of the loop to the last, the time between them included."""

    @property
    def goodput_per_s(self) -> float | None:
        """Requests per second that met both bounds (DistServe, OSDI '24, arXiv:2401.09670)."""
        if self.num_in_bounds is None or not self.elapsed_s:
            return None
        return self.num_in_bounds / self.elapsed_s


class Stopwatch:
    """How long the device takes for each dispatch, seen from the host.

    The device runs one after the other, so one takes from its start, or from the end of the one
    before if that is later, to its own end.  A host that reads late makes it look longer.
    """

    def __init__(self) -> None:
        self._started: deque[float] = deque()
        self._last_end = 0.0

    def start(self) -> None:
        """A dispatch was started now."""
        self._started.append(time.perf_counter())

    def stop(self) -> float:
        """The oldest dispatch has just ended: the seconds that it took."""
        now = time.perf_counter()
        begin = max(self._started.popleft(), self._last_end)
        self._last_end = now
        return now - begin


WAIT = "wait"
"""The phase in which the host waits for the device."""


@dataclass
class StepMeter:
    """Accumulates what `EngineStats` reports."""

    num_slots: int
    steps: int = 0
    dispatches: int = 0
    rows: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase of the loop."""
    by_shape: dict[str, int] = field(default_factory=dict)
    num_in_bounds: int = 0
    turn_host_s: float = 0.0
    """Seconds of this turn in which the host did not wait, up to the last mark."""
    _first: float | None = None
    _last: float = 0.0

    def count(
        self, plan: StepPlan, shape: StepShape, steps: int, sampled: Sequence[Sequence[int]]
    ) -> None:
        """Count the `steps` that a dispatch ran, and what its entries sampled."""
        self.dispatches += 1
        self.steps += steps
        self.rows += steps * shape.tokens
        decoded = zip(plan.entries, sampled, strict=True)
        self.tokens += sum(len(tokens) for entry, tokens in decoded if entry.is_decode)
        self.tokens += plan.num_chunk_tokens
        self.by_shape[str(shape)] = self.by_shape.get(str(shape), 0) + steps

    def reset(self) -> None:
        """Count anew, from zero."""
        fresh = StepMeter(self.num_slots)
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(fresh, name))

    def begin(self) -> None:
        """Begin a turn of the engine's loop."""
        self._last = time.perf_counter()
        self.turn_host_s = 0.0
        if self._first is None:
            self._first = self._last

    def mark(self, phase: str) -> None:
        """The time since the last mark of this turn was spent on `phase`."""
        now = time.perf_counter()
        elapsed = now - self._last
        self._last = now
        self.busy_s += elapsed
        self.turn_host_s += 0.0 if phase == WAIT else elapsed
        self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed

    @property
    def elapsed_s(self) -> float | None:
        """From the first turn to the last mark."""
        return None if self._first is None else self._last - self._first

    @property
    def host_s_by_phase(self) -> dict[str, float]:
        """Seconds by phase, without the wait for the device."""
        return {phase: s for phase, s in self.seconds.items() if phase != WAIT}

    @property
    def host_s(self) -> float:
        """Seconds in which the host did not wait for the device."""
        return sum(self.host_s_by_phase.values())

    @property
    def slot_utilisation(self) -> float | None:
        """Output tokens per slot and step."""
        return self.output_tokens / (self.steps * self.num_slots) if self.steps else None

    @property
    def padded_share(self) -> float | None:
        """Share of rows without a token."""
        return 1 - self.tokens / self.rows if self.rows else None

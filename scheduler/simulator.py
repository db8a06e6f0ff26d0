"""The same scheduler in virtual time: arrivals and a model of step times in, figures out.

Knows the engine's loop: schedule, run, update, with one step in flight.  A device that takes the
time of a cost model stands in for the real one, and its tokens are made up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any, Literal

from scheduler.plan import ScheduledTokens, StepPlan
from scheduler.residents import SchedulerStats
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.step_time import Buckets, StepCost, StepWork
from scheduler.summary import Bounds, over, summarise
from scheduler.trace import Arrival, Arrivals, Listed

_TOKEN, _STOP = 0, 1
"""What the device samples: a token that ends nothing, and one that does."""
_PROMPT = 2
"""The first token id of prompts that the trace does not spell out."""

Phase = Literal["prefill", "decode"]


class VirtualClock:
    """Seconds of virtual time; called, it says how many."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """The time now."""
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        """Move on, never back."""
        self.now_s = max(self.now_s, time_s)


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


def simulate(
    scheduler: Scheduler,
    arrivals: Arrivals | Iterable[Arrival],
    cost: StepCost,
    *,
    clock: VirtualClock | None = None,
    asynchronous: bool = True,
    host_s: float = 0.0,
    buckets: Buckets | None = None,
    bounds: Bounds | None = None,
    record_slots: bool = True,
    observe: Callable[[StepWork, float], None] | None = None,
) -> Simulation:
    """Serve a trace to its end in virtual time.

    Each turn does what `Engine.step` does: it schedules a plan, gives it to the device, and
    updates the scheduler with the results of the plan before, or of this one if not
    `asynchronous`.  The device runs plans one after another.

    Args:
        scheduler: idle and new; the one that an engine would have.
        arrivals: requests with their times, or a source of them such as `ClosedLoop`.
        cost: how long the device takes for a plan.
        clock: the virtual clock, if an admission policy of the scheduler reads it, too.
        asynchronous: schedule a plan before the results of the one before are known.
        host_s: seconds that the host takes for each turn, beside waiting for the device.
        buckets: the sizes that steps are padded to; none if absent.
        bounds: what a request must keep to count as served well.
        record_slots: keep who held which slot in each step.
        observe: told each plan's work and seconds once its results are known, such as
            `FittedCost.record` for a scheduler that learns from measured steps.

    Raises:
        ValueError: a request of the trace can never run.
    """
    source = arrivals if _is_source(arrivals) else Listed(arrivals)  # type: ignore[arg-type]
    return _Simulator(
        scheduler,
        source,  # type: ignore[arg-type]
        _Device(cost, scheduler.config.multi_step, buckets or Buckets()),
        clock or VirtualClock(),
        depth=1 if asynchronous else 0,
        host_s=host_s,
        bounds=bounds or Bounds(),
        record_slots=record_slots,
        observe=observe or (lambda work, seconds: None),
    ).run()


def _is_source(arrivals: Arrivals | Iterable[Arrival]) -> bool:
    return hasattr(arrivals, "due")


@dataclass(slots=True)
class _Flight:
    """A plan on the device: what it will have sampled, and when it will be done."""

    plan: StepPlan
    work: StepWork
    tokens: list[list[int]]
    start_s: float
    seconds: float

    @property
    def done_s(self) -> float:
        return self.start_s + self.seconds


class _Device:
    """Runs plans in order, each for the time that the cost model says."""

    def __init__(self, cost: StepCost, multi_step: int, buckets: Buckets) -> None:
        self._cost = cost
        self._multi_step = multi_step
        self._buckets = buckets
        self._free_s = 0.0
        self._num_sampled: dict[Sequence, int] = {}

    def run(self, plan: StepPlan, now_s: float, ends: dict[Sequence, int]) -> _Flight:
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
        return _Flight(plan, work, tokens, start_s, seconds)

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
        tokens = [_TOKEN] * count
        if 0 < count == ends[seq] - before and ends[seq] < seq.max_tokens:
            tokens[-1] = _STOP
        return tokens


class _Simulator:
    """The loop of one simulation."""

    def __init__(
        self,
        scheduler: Scheduler,
        source: Arrivals,
        device: _Device,
        clock: VirtualClock,
        *,
        depth: int,
        host_s: float,
        bounds: Bounds,
        record_slots: bool,
        observe: Callable[[StepWork, float], None],
    ) -> None:
        self._scheduler = scheduler
        self._source = source
        self._device = device
        self._clock = clock
        self._depth = depth
        self._host_s = host_s
        self._bounds = bounds
        self._record_slots = record_slots
        self._observe = observe
        self._flights: deque[_Flight] = deque()
        self._requests: dict[Sequence, SimulatedRequest] = {}
        self._ends: dict[Sequence, int] = {}
        self._steps: list[SimulatedStep] = []
        self._kv = KVUse()
        self._next_id = _PROMPT

    def run(self) -> Simulation:
        while True:
            self._submit(self._source.due(self._clock.now_s))
            if self._turn():
                continue
            next_s = self._next_s()
            if next_s is None:
                break
            self._clock.advance_to(next_s)
        return Simulation(
            requests=tuple(self._requests.values()),
            steps=tuple(self._steps),
            wall_s=self._clock.now_s,
            num_slots=self._scheduler.config.max_num_seqs,
            num_pages=self._scheduler.pool.num_pages - 1,
            kv=self._kv,
            stats=replace(self._scheduler.stats),
            bounds=self._bounds,
        )

    def _next_s(self) -> float | None:
        """When there may be something to run, if nothing runs now; None at the end."""
        next_s = self._source.next_s()
        if not self._scheduler.has_work:
            return next_s
        wait_s = self._scheduler.wait_s  # until the window of a dynamic batch has passed
        assert wait_s > 0 or next_s is not None, "what waits is never admitted"
        opens_s = self._clock.now_s + wait_s if wait_s > 0 else inf
        return opens_s if next_s is None else min(opens_s, next_s)

    def _submit(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            seq = self._sequence(arrival)
            self._scheduler.add(seq)
            self._ends[seq] = min(arrival.num_output, seq.max_tokens)
            self._requests[seq] = SimulatedRequest(arrival, seq)

    def _sequence(self, arrival: Arrival) -> Sequence:
        token_ids = arrival.token_ids
        if token_ids is None:
            token_ids = tuple(range(self._next_id, self._next_id + arrival.num_prompt))
            self._next_id += arrival.num_prompt
        may_stop = arrival.max_tokens is not None
        return Sequence(
            seq_id=f"request-{len(self._requests) + 1}/0",
            token_ids=list(token_ids),
            max_tokens=arrival.max_tokens or arrival.num_output,
            stop_ids=frozenset((_STOP,)) if may_stop else frozenset(),
            priority=arrival.priority,
            key=arrival.key,
        )

    def _turn(self) -> bool:
        """One turn of the engine's loop; whether anything ran or was read."""
        plan = self._scheduler.schedule()
        if plan:
            self._clock.now_s += self._host_s
            self._run(plan)
        num_read = self._update(keep=self._depth if plan else 0)
        return bool(plan) or num_read > 0

    def _run(self, plan: StepPlan) -> None:
        for seq in plan.admitted:
            request = self._requests[seq]
            if request.start_s is None:
                request.start_s = self._clock.now_s
        flight = self._device.run(plan, self._clock.now_s, self._ends)
        self._flights.append(flight)
        self._record(flight)

    def _record(self, flight: _Flight) -> None:
        plan, work, scheduler = flight.plan, flight.work, self._scheduler
        self._kv.count(scheduler, work.num_steps)
        decoded = zip(plan.entries, flight.tokens, strict=True)
        num_tokens = sum(len(tokens) for entry, tokens in decoded if entry.is_decode)
        self._steps.append(
            SimulatedStep(
                start_s=flight.start_s,
                seconds=flight.seconds,
                work=work,
                padded_tokens=self._device.padded_tokens(work),
                tokens=num_tokens + plan.num_chunk_tokens,
                waiting=scheduler.num_waiting,
                free_pages=scheduler.pool.num_free,
                held_pages=scheduler.pool.num_held,
                preempted=tuple(seq.seq_id for seq in plan.preempted),
                slots=self._slots(plan) if self._record_slots else (),
            )
        )

    def _slots(self, plan: StepPlan) -> tuple[tuple[int, str, Phase], ...]:
        """Who has which slot while the plan runs, and what it does there."""
        computes = {entry.seq: entry.is_decode for entry in plan.entries}
        held: list[tuple[int, str, Phase]] = []
        for seq in self._scheduler.running:
            assert seq.slot is not None
            decodes = computes.get(seq, seq.num_prefill == 0)
            held.append((seq.slot, seq.seq_id, "decode" if decodes else "prefill"))
        return tuple(sorted(held))

    def _update(self, keep: int) -> int:
        """Read all but the newest `keep` plans, once the device is done with them."""
        num_read = 0
        while len(self._flights) > keep:
            flight = self._flights.popleft()
            self._clock.advance_to(flight.done_s)
            self._observe(flight.work, flight.seconds)
            update = self._scheduler.update(flight.plan, flight.tokens)
            for index, count in update.accepted:
                request = self._requests[flight.plan.entries[index].seq]
                request.token_times_s += [self._clock.now_s] * count
            for seq in update.finished:
                self._source.on_finish(self._requests[seq].arrival, self._clock.now_s)
            num_read += 1
        return num_read

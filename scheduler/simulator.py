"""The same scheduler in virtual time: arrivals and a model of step times in, figures out.

Knows the engine's loop: schedule, run, update, with one step in flight.  A device that takes the
time of a cost model stands in for the real one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import inf

from scheduler.plan import StepPlan
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from scheduler.simulated_device import STOP, Device, Flight
from scheduler.simulation import KVUse, Phase, SimulatedRequest, SimulatedStep, Simulation
from scheduler.step_time import Buckets, StepCost, StepWork
from scheduler.summary import Bounds
from scheduler.trace import Arrival, Arrivals, Listed

_PROMPT = 2
"""The first token id of prompts that the trace does not spell out."""


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
        Device(cost, scheduler.config.multi_step, buckets or Buckets()),
        clock or VirtualClock(),
        depth=1 if asynchronous else 0,
        host_s=host_s,
        bounds=bounds or Bounds(),
        record_slots=record_slots,
        observe=observe or (lambda work, seconds: None),
    ).run()


def _is_source(arrivals: Arrivals | Iterable[Arrival]) -> bool:
    return hasattr(arrivals, "due")


class _Simulator:
    """The loop of one simulation."""

    def __init__(
        self,
        scheduler: Scheduler,
        source: Arrivals,
        device: Device,
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
        self._flights: deque[Flight] = deque()
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
            stop_ids=frozenset((STOP,)) if may_stop else frozenset(),
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

    def _record(self, flight: Flight) -> None:
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

"""The simulator's plans are the engine's: the same trace, step by step, entry by entry."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxserve.engine import Engine
from scheduler import AdmissionPolicy, BlockPool, Continuous, Scheduler, Static, StepPlan
from scheduler.simulation import Simulation
from scheduler.simulator import simulate
from scheduler.step_time import Buckets, StepWork
from scheduler.trace import Arrival
from tests.engine.mini import Mini, greedy, prompts

Plan = tuple[Any, ...]


@dataclass
class ByTurn:
    """Arrivals stamped in turns of the loop: a simulator's source, which asks once a turn."""

    stamped: list[tuple[int, Arrival]]
    turn: int = -1
    handed_out: int = field(default=0)

    def due(self, now_s: float) -> list[Arrival]:
        self.turn += 1
        due = [arrival for turn, arrival in self.stamped if turn == self.turn]
        self.handed_out += len(due)
        return due

    def next_s(self) -> float | None:
        return 0.0 if self.handed_out < len(self.stamped) else None

    def on_finish(self, arrival: Arrival, now_s: float) -> None:
        pass


class OneSecond:
    def seconds(self, work: StepWork) -> float:
        return 1.0


def watched(scheduler: Scheduler) -> tuple[Scheduler, list[Plan]]:
    """A scheduler that notes what it plans, empty plans included."""
    plans: list[Plan] = []
    schedule = scheduler.schedule

    def noted() -> StepPlan:
        plan = schedule()
        entries = tuple(
            (e.seq.seq_id, e.slot, e.start, e.count, e.samples, e.is_decode, e.new_pages)
            for e in plan.entries
        )
        admitted = tuple(seq.seq_id for seq in plan.admitted)
        preempted = tuple(seq.seq_id for seq in plan.preempted)
        plans.append((entries, admitted, preempted, plan.num_steps))
        return plan

    scheduler.schedule = noted  # type: ignore[method-assign]
    return scheduler, plans


def buckets_of(mini: Mini) -> Buckets:
    return Buckets(mini.runner.shapes.decode_rows, mini.runner.shapes.chunks)


def fresh(like: Scheduler, admission: AdmissionPolicy) -> Scheduler:
    pool = BlockPool(like.pool.num_pages, like.pool.page_size)
    return Scheduler(like.config, pool, admission)


def run_engine(
    engine: Engine, stamped: list[tuple[int, list[int], int]], *, ignore_eos: bool = True
) -> tuple[list[Plan], list[list[int]]]:
    """Submit each prompt before the turn of its stamp; the plans of all turns, and the outputs."""
    _, plans = watched(engine.scheduler)
    ids, turn = [], 0
    while len(ids) < len(stamped) or engine.has_work:
        for stamp, prompt, max_tokens in stamped:
            if stamp == turn:
                ids.append(engine.submit(prompt, greedy(max_tokens, ignore_eos=ignore_eos)))
        engine.step()
        turn += 1
    return plans, [engine.take(request_id).outputs[0].token_ids for request_id in ids]


def run_simulator(
    scheduler: Scheduler,
    stamped: list[tuple[int, Arrival]],
    *,
    buckets: Buckets,
    asynchronous: bool,
) -> tuple[list[Plan], Simulation]:
    watching, plans = watched(scheduler)
    simulation = simulate(
        watching, ByTurn(stamped), OneSecond(), asynchronous=asynchronous, buckets=buckets
    )
    return plans, simulation


def ended(plans: list[Plan]) -> list[Plan]:
    """Without the empty plans at the end: both look once more whether there is work."""
    while plans and not plans[-1][0]:
        plans = plans[:-1]
    return plans


def make_trace(seed: int, count: int = 24, shared: int = 0) -> list[tuple[int, list[int], int]]:
    """Requests stamped in turns, some together and some after a pause; a prefix shared by all."""
    rng = random.Random(seed)
    (prefix,) = prompts([shared], seed=99) if shared else ([],)
    own = prompts([rng.randint(3, 90) for _ in range(count)], seed)
    turn, trace = 0, []
    for number, prompt in enumerate(own):
        turn += 150 if number == count // 2 else rng.choice((0, 0, 1, 2, 7))
        trace.append((turn, [*prefix, *prompt], rng.randint(1, 40)))
    return trace


SAME = (
    *("steps", "dispatches", "output_tokens", "padded_share", "discarded_tokens", "preemptions"),
    *("prefix_query_tokens", "prefix_hit_tokens"),
)


def assert_same_figures(simulation: Simulation, engine: Engine) -> None:
    report, stats = simulation.summary(), engine.stats()
    expected = {name: getattr(stats, name) for name in SAME}
    assert {name: report[name] for name in SAME} == pytest.approx(expected, rel=1e-12)


CASES: dict[str, tuple[dict[str, Any], Callable[[], AdmissionPolicy]]] = {
    "roomy": ({}, Continuous),
    "several steps": ({"multi_step": 8}, Continuous),
    "preemption": ({"pages": 24}, Continuous),
    "preemption, several steps": ({"pages": 24, "multi_step": 8}, Continuous),
    "small chunks": ({"budget": 24, "slots": 4, "chunk": 16}, Continuous),
    "no prefix cache": ({"enable_prefix_caching": False, "pages": 24}, Continuous),
    "no mixed steps": ({"mixed": False, "slots": 5}, Continuous),
    "static": ({"slots": 4, "multi_step": 4}, Static),
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("case", CASES)
def test_plans_are_the_same(mini: Mini, case: str, asynchronous: bool) -> None:
    limits, admission = CASES[case]
    trace = make_trace(seed=len(case), shared=20)
    engine = mini.engine(asynchronous=asynchronous, **limits)
    engine.scheduler = fresh(engine.scheduler, admission())
    simulated = fresh(engine.scheduler, admission())
    expected, outputs = run_engine(engine, trace)
    arrivals = [
        (turn, Arrival(0.0, len(ids), length, token_ids=tuple(ids))) for turn, ids, length in trace
    ]
    plans, simulation = run_simulator(
        simulated, arrivals, buckets=buckets_of(mini), asynchronous=asynchronous
    )
    assert ended(plans) == ended(expected)
    assert [len(r.token_times_s) for r in simulation.requests] == [len(ids) for ids in outputs]
    stats, real = simulated.stats, engine.scheduler.stats
    assert stats == real
    assert real.num_preemptions > 0 or "preemption" not in case
    assert real.prefix_hit_tokens > 0 or not engine.scheduler.config.enable_prefix_caching
    assert max(plan[-1] for plan in plans) > 1 or engine.scheduler.config.multi_step == 1
    assert_same_figures(simulation, engine)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("multi_step", [1, 8])
def test_plans_are_the_same_where_tokens_end_requests(
    mini: Mini, multi_step: int, asynchronous: bool
) -> None:
    """The trace says when: the device then stops a row in the middle of its steps."""
    eos = frozenset(range(0, mini.config.vocab_size, 11))
    limits = {"multi_step": multi_step, "pages": 30, "asynchronous": asynchronous}
    engine = mini.engine(eos=eos, **limits)
    simulated = fresh(engine.scheduler, Continuous())
    trace = make_trace(seed=5)
    expected, outputs = run_engine(engine, trace, ignore_eos=False)
    assert any(len(ids) < length for ids, (_, _, length) in zip(outputs, trace, strict=True))
    arrivals = [
        (turn, Arrival(0.0, len(ids), len(output), token_ids=tuple(ids), max_tokens=length))
        for (turn, ids, length), output in zip(trace, outputs, strict=True)
    ]
    plans, simulation = run_simulator(
        simulated, arrivals, buckets=buckets_of(mini), asynchronous=asynchronous
    )
    assert ended(plans) == ended(expected)
    # The shared runner's decode steps are all loops, which may run no step at all; those of an
    # engine with multi_step=1, as the simulator knows it, always run one.
    if multi_step > 1:
        assert_same_figures(simulation, engine)

"""One engine under every policy: the same tokens, the steps that the policy says, and goodput."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve import sharding
from jaxserve.bench.host import make_engine
from jaxserve.bench.report import make_report
from jaxserve.config import EngineConfig
from jaxserve.drive import run_all
from jaxserve.engine import LONGEST_REST_S, Engine
from jaxserve.outputs import RequestMetrics
from jaxserve.sampling_params import SamplingParams
from jaxserve.startup import assemble
from scheduler import AdmissionPolicy, BlockPool, Continuous, Dynamic, Scheduler, Static
from scheduler.step_time import FittedCost, StepWork
from scheduler.summary import Bounds
from tests.engine.mini import Mini, greedy, prompts, random_params, run, tokens

WORKLOAD = json.loads((Path(__file__).parents[1] / "smollm2" / "workload.json").read_text())
POLICIES: dict[str, Callable[[], AdmissionPolicy]] = {
    "continuous": Continuous,
    "static": Static,
    "dynamic": lambda: Dynamic(0.002, time.monotonic),
}


def under(
    engine: Engine,
    admission: AdmissionPolicy | None = None,
    *,
    asynchronous: bool = True,
    step_cost: FittedCost | None = None,
    targets: Bounds | None = None,
    **limits: Any,
) -> Engine:
    """Another engine on the same runner, with a policy and further limits."""
    config = replace(engine.scheduler.config, **limits)
    pool = engine.scheduler.pool
    return Engine(
        engine.runner,
        Scheduler(
            config,
            BlockPool(pool.num_pages, pool.page_size),
            admission,
            clock=time.monotonic,
            cost=step_cost,
        ),
        engine.tokenizer,
        end_ids=engine.end_ids,
        seed=0,
        asynchronous=asynchronous,
        step_cost=step_cost,
        targets=targets,
    )


def requests(count: int = 14) -> list[tuple[list[int], SamplingParams]]:
    """More than there are slots, ragged in prompt and output."""
    asked = prompts([3 + 11 * i % 70 for i in range(count)], seed=2)
    return [(prompt, greedy(2 + 5 * i % 17)) for i, prompt in enumerate(asked)]


@pytest.fixture(scope="module")
def want(mini: Mini) -> list[list[list[int]]]:
    return tokens(run(mini.engine(), requests()))


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("multi_step", [1, 8])
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_the_same_under_every_policy(
    mini: Mini, want: Any, policy: str, mixed: bool, multi_step: int, every: int
) -> None:
    engine = under(mini.engine(slots=4), POLICIES[policy](), mixed=mixed, multi_step=multi_step)
    assert tokens(run(engine, requests(), every=every)) == want
    assert engine.compilations.count == 0


@pytest.mark.parametrize("fields", [{"fair_share": True}, {"max_prefill_tokens": 5}])
def test_tokens_are_the_same_with_other_orders_and_chunks(
    mini: Mini, want: Any, fields: dict[str, Any]
) -> None:
    assert tokens(run(under(mini.engine(slots=4), **fields), requests())) == want


def test_without_mixed_steps_decodes_have_steps_of_their_own(mini: Mini) -> None:
    def num_decode_steps(*, mixed: bool) -> int:
        engine = under(mini.engine(slots=4), mixed=mixed)
        run(engine, requests())
        by_shape = engine.stats().steps_by_shape
        assert set(by_shape) <= {"decode8", "mixed8x16", "mixed8x64"}
        return by_shape["decode8"]

    assert num_decode_steps(mixed=False) > num_decode_steps(mixed=True)


# The workload on the engine's own loop, over a device that computes nothing


@pytest.mark.parametrize(
    ("policy", "slots", "steps"),
    [
        ("continuous", 16, (505, 510)),
        ("continuous", 32, (338, 340)),
        ("static", 16, (1037, 1037)),
        ("static", 32, (527, 527)),
        ("dynamic", 16, (1037, 1037)),
        ("dynamic", 32, (527, 527)),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_exact_steps_of_the_workload(
    policy: str, slots: int, steps: tuple[int, int], asynchronous: bool
) -> None:
    """The counts of `tests/scheduler/test_policies.py`, where they are derived."""
    engine, _ = make_engine(slots, 0.0, 1)
    engine = under(
        engine, POLICIES[policy](), asynchronous=asynchronous, token_budget=512,
        max_prefill_tokens=512,
    )  # fmt: skip
    for number, request in enumerate(WORKLOAD):
        ids = [number] * len(request["prompt_token_ids"])
        engine.submit(ids, SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True))
    outputs = list(run_all(engine))
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 5936
    assert engine.stats().steps == steps[asynchronous]


# The window of a dynamic batch


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_idle_engine_sleeps_through_the_window(
    mini: Mini, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """And in slices, so that whoever drives it can submit and abort meanwhile."""
    now, slept = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    engine = under(mini.engine(), Dynamic(0.0125, lambda: now), asynchronous=asynchronous)
    monkeypatch.setattr(time, "sleep", sleep)
    [output] = run(engine, requests(1))
    assert len(output.outputs[0].token_ids) == 2
    assert [seconds for seconds in slept if seconds > 0] == pytest.approx(
        [LONGEST_REST_S, LONGEST_REST_S, 0.0025]
    )
    assert engine.stats().dispatches == 2


def test_a_window_that_is_full_is_not_waited_for(mini: Mini) -> None:
    engine = under(mini.engine(slots=4), Dynamic(1e9, lambda: 0.0))
    assert len(run(engine, requests(4))) == 4


# Whose turn it is


def test_keys_reach_the_scheduler(mini: Mini) -> None:
    engine = under(mini.engine(slots=1), fair_share=True)
    prompt, params = requests(1)[0]
    ids = [engine.submit(prompt, params, key=key) for key in ("many", "many", "many", "one")]
    order = [output.request_id for output in run_all(engine)]
    assert order == [ids[0], ids[3], ids[1], ids[2]]


# Latency bounds and goodput


def test_dispatches_are_timed(mini: Mini) -> None:
    cost = FittedCost()
    engine = under(mini.engine(multi_step=4), step_cost=cost)
    run(engine, requests())
    assert cost.num_records == engine.stats().dispatches
    assert cost.seconds(StepWork(rows=4, chunk_tokens=0, kv_tokens=100, num_seqs=4)) > 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_bound_nobody_can_keep_changes_no_token(
    mini: Mini, want: Any, asynchronous: bool
) -> None:
    engine = under(
        mini.engine(), asynchronous=asynchronous, step_cost=FittedCost(),
        target_tpot_s=1e-9, target_ttft_s=1e-9,
    )  # fmt: skip
    assert tokens(run(engine, requests())) == want


@pytest.mark.parametrize(
    ("targets", "share"),
    [
        (Bounds(1e9, 1e9), 1.0),
        (Bounds(1e-9, None), 0.0),
        (Bounds(None, 1e-9), 1 / 14),  # of one token only: no time per further one
    ],
)
def test_goodput_counts_who_met_the_bounds(mini: Mini, targets: Bounds, share: float) -> None:
    engine = under(mini.engine(), targets=targets)
    asked = requests()
    asked[3] = (asked[3][0], greedy(1))
    outputs = run(engine, asked)
    stats = engine.stats()
    assert stats.num_in_bounds == round(share * len(outputs))
    assert stats.elapsed_s is not None
    assert stats.goodput_per_s == pytest.approx(stats.num_in_bounds / stats.elapsed_s)
    report = make_report(outputs, 2.0, stats)
    assert report["goodput_requests_per_s"] == stats.num_in_bounds / 2
    assert report["goodput_share"] == pytest.approx(share)
    engine.reset_stats()
    assert engine.stats().num_in_bounds == 0


def test_an_aborted_request_is_no_goodput(mini: Mini) -> None:
    engine = under(mini.engine(), targets=Bounds(1e9, 1e9))
    ids = [engine.submit(prompt, params) for prompt, params in requests(3)]
    engine.step()
    engine.abort(ids[0])
    while engine.has_work:
        engine.step()
    assert engine.stats().num_in_bounds == 2


def test_without_bounds_there_is_no_goodput(mini: Mini) -> None:
    engine = mini.engine()
    outputs = run(engine, requests(2))
    assert engine.stats().goodput_per_s is None
    assert "goodput_share" not in make_report(outputs, 1.0, engine.stats())


@pytest.mark.parametrize(
    ("ttft", "itl", "is_good"),
    [
        (0.1, [0.01, 0.03], True),
        (0.1001, [0.01], False),
        (0.1, [0.01, 0.0301], False),
        (0.1, [], True),
    ],
)
def test_bounds_are_inclusive_and_of_the_mean(ttft: float, itl: list[float], is_good: bool) -> None:
    metrics = RequestMetrics(arrival_time=0.0, ttft=ttft, itl=itl)
    assert Bounds(0.1, 0.02).hold(metrics.ttft, metrics.tpot) == is_good


# From the configuration


def assembled(mini: Mini, executables: Path, **fields: Any) -> Engine:
    mesh = sharding.make_mesh("cpu", 1)
    options = {**mini.options, **fields}
    config = EngineConfig(compilation_cache_dir=str(executables), warm_up=False, **options)
    return assemble(config, mini.config, random_params(mini.config, mesh), mini.tokenizer, mesh)[0]


def test_options_reach_the_scheduler(mini: Mini, executables: Path) -> None:
    engine = assembled(
        mini, executables, batching="dynamic", dynamic_window_ms=7.0, mixed=False,
        max_prefill_tokens=40, target_ttft_ms=500.0, target_tpot_ms=100.0, fair_share=True,
        scheduling_policy="priority", priority_ageing_s=3.0,
    )  # fmt: skip
    config = engine.scheduler.config
    assert (config.mixed, config.fair_share, config.priority_ageing_s) == (False, True, 3.0)
    assert (config.max_prefill_tokens, config.min_prefill_tokens) == (40, 16)
    assert (config.target_ttft_s, config.target_tpot_s) == (0.5, 0.1)
    assert engine.step_cost is not None
    assert engine.step_cost.buckets.chunks == (16, 64)
    engine.submit([5, 6], greedy(2))
    assert engine.scheduler.schedule().is_empty
    assert 0 < engine.scheduler.wait_s <= 0.007


def test_the_defaults_are_continuous_and_without_bounds(mini: Mini, executables: Path) -> None:
    engine = assembled(mini, executables)
    assert engine.scheduler.config.max_prefill_tokens == 64
    assert engine.step_cost is None
    engine.submit([5, 6], greedy(1))
    engine.submit([5, 6], greedy(4))
    engine.step()
    late = engine.submit([5, 6], greedy(1))
    engine.step()
    engine.step()
    assert engine.is_finished(late)
    while engine.has_work:
        engine.step()


def test_a_static_engine_is_static(mini: Mini, executables: Path) -> None:
    engine = assembled(mini, executables, batching="static")
    engine.submit([5, 6], greedy(9))
    engine.step()
    late = engine.submit([5, 6], greedy(1))
    for _ in range(5):
        engine.step()
    assert not engine.output(late).outputs[0].token_ids
    while engine.has_work:
        engine.step()
    assert engine.is_finished(late)

"""The scheduler in virtual time: traces, figures, and the numbers that are published elsewhere."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scheduler import AdmissionPolicy, BlockPool, Continuous, Dynamic, Scheduler, Static
from scheduler.simulation import Simulation
from scheduler.simulator import VirtualClock, simulate
from scheduler.step_time import Buckets, StepWork
from scheduler.summary import Bounds, cost_per_million_tokens, percentile
from scheduler.trace import (
    Arrival,
    ClosedLoop,
    at_once,
    fixed,
    gamma,
    pareto,
    parse_length,
    poisson,
    read_jsonl,
    uniform,
)
from tests.scheduler.harness import make_config

ROOMY: dict[str, Any] = {"token_budget": 512, "max_prefill_tokens": 256, "max_model_len": 2048}


class PerStep:
    """A device whose iterations all take the same time."""

    def __init__(self, step_s: float = 1.0) -> None:
        self.step_s = step_s

    def seconds(self, work: StepWork) -> float:
        return self.step_s * work.num_steps


def scheduler(
    admission: AdmissionPolicy | None = None,
    *,
    pages: int = 4097,
    page_size: int = 16,
    **limits: Any,
) -> Scheduler:
    return Scheduler(make_config(**(ROOMY | limits)), BlockPool(pages, page_size), admission)


# Traces


def test_poisson_arrivals_have_their_rate() -> None:
    arrivals = poisson(4000, 20.0, prompt=fixed(10), output=uniform(5, 9), seed=1)
    gaps = gaps_of(arrivals)
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert {a.num_output for a in arrivals} == {5, 6, 7, 8, 9}
    assert arrivals == poisson(4000, 20.0, prompt=fixed(10), output=uniform(5, 9), seed=1)
    assert arrivals != poisson(4000, 20.0, prompt=fixed(10), output=uniform(5, 9), seed=2)


@pytest.mark.parametrize("cv", [0.5, 3.0])
def test_gamma_arrivals_have_their_burstiness(cv: float) -> None:
    gaps = gaps_of(gamma(20000, 5.0, cv=cv, prompt=fixed(1), output=fixed(1), seed=3))
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.05)


def gaps_of(arrivals: list[Arrival]) -> list[float]:
    times = [0.0, *(arrival.time_s for arrival in arrivals)]
    return [after - before for before, after in pairwise(times)]


def test_a_heavy_tail_is_cut_off() -> None:
    rng, draw = random.Random(5), pareto(20, 2000, 1.2)
    lengths = [draw(rng) for _ in range(5000)]
    assert min(lengths) == 20
    assert max(lengths) == 2000
    assert statistics.fmean(lengths) > 2 * statistics.median(lengths)


@pytest.mark.parametrize(
    ("text", "least", "most"), [("7", 7, 7), ("3-5", 3, 5), ("10-40:1.5", 10, 40)]
)
def test_lengths_from_text(text: str, least: int, most: int) -> None:
    rng, draw = random.Random(6), parse_length(text)
    lengths = {draw(rng) for _ in range(2000)}
    assert (min(lengths), max(lengths)) == (least, most)


@pytest.mark.parametrize("text", ["", "0", "5-3", "a-b", "10:1.2", "10-20:x", "10-20:-1"])
def test_texts_that_are_no_length(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length such as 100, 80-120"):
        parse_length(text)


def test_a_trace_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"time_s": 0.5, "num_prompt": 3, "num_output": 2, "priority": 1, "key": "a"},
        {"time_s": 0.25, "token_ids": [4, 5], "num_output": 1, "max_tokens": 8},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_jsonl(path) == [
        Arrival(0.5, 3, 2, priority=1, key="a"),
        Arrival(0.25, 2, 1, token_ids=(4, 5), max_tokens=8),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1: .*missing"),
        ("[1]", "line 1: not a JSON object"),
        ("{", "line 1: "),
        ('{"time_s": -1, "num_prompt": 1, "num_output": 1}', "time_s=-1 must be at least 0"),
        ('{"time_s": 0, "num_prompt": 0, "num_output": 1}', "num_prompt=0"),
        ('{"time_s": 0, "num_prompt": 3, "num_output": 1, "token_ids": [1]}', "1 token_ids"),
        ('{"time_s": 0, "num_prompt": 3, "num_output": 2, "max_tokens": 1}', "max_tokens=1"),
        ('{"time_s": 0, "num_prompt": 3, "num_output": 2, "colour": 1}', "colour"),
        ("", "has no arrivals"),
    ],
)
def test_files_that_are_no_trace(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_jsonl(path)


# The loop


def test_times_of_one_request() -> None:
    result = simulate(scheduler(), [Arrival(2.0, 10, 4)], PerStep(0.5))
    (request,) = result.requests
    assert request.token_times_s == [2.5, 3.0, 3.5, 4.0]
    assert (request.queue_s, request.ttft_s, request.tpot_s, request.e2e_s) == (0, 0.5, 0.5, 2.0)
    assert [step.start_s for step in result.steps] == [2.0, 2.5, 3.0, 3.5]
    assert result.wall_s == 4.0


def test_tokens_of_one_dispatch_come_together() -> None:
    result = simulate(scheduler(multi_step=4), [Arrival(0.0, 10, 6)], PerStep())
    (request,) = result.requests
    assert [step.work.num_steps for step in result.steps] == [1, 4, 1]
    assert request.token_times_s == [1, 5, 5, 5, 5, 6]
    assert request.itl_s == [4, 0, 0, 0, 1]
    assert result.summary()["steps"] == 6
    assert result.summary()["dispatches"] == 3


def test_the_host_is_hidden_by_one_step_in_flight() -> None:
    """Each step waits for the host only where nothing runs meanwhile."""
    arrivals = [Arrival(0.0, 10, 101)]
    hidden = simulate(scheduler(), arrivals, PerStep(), host_s=0.25)
    exposed = simulate(scheduler(), arrivals, PerStep(), host_s=0.25, asynchronous=False)
    assert hidden.wall_s == pytest.approx(101 + 0.25)
    assert exposed.wall_s == pytest.approx(101 * 1.25)


def test_an_arrival_waits_for_the_step_in_flight() -> None:
    arrivals = [Arrival(0.0, 8, 20), Arrival(3.5, 8, 1)]
    result = simulate(scheduler(), arrivals, PerStep())
    # At 3.5 the step of second 3 runs and that of second 4 is on its way.
    assert result.requests[1].token_times_s == [6.0]
    synchronous = simulate(scheduler(), arrivals, PerStep(), asynchronous=False)
    assert synchronous.requests[1].token_times_s == [5.0]


def test_an_end_by_a_token_costs_a_step_in_flight() -> None:
    known = simulate(scheduler(), [Arrival(0.0, 8, 5)], PerStep())
    surprise = simulate(scheduler(), [Arrival(0.0, 8, 5, max_tokens=50)], PerStep())
    assert len(known.steps) == 5
    assert len(surprise.steps) == 6
    assert [len(r.token_times_s) for r in surprise.requests] == [5]
    repeated = simulate(scheduler(multi_step=8), [Arrival(0.0, 8, 5, max_tokens=50)], PerStep())
    # The device stops with its last row, and the dispatch after that has none.
    assert [step.work.num_steps for step in repeated.steps] == [1, 4, 0]


def test_a_closed_loop_keeps_its_users() -> None:
    source = ClosedLoop(50, 3, prompt=fixed(4), output=uniform(2, 9), think_s=5.0, seed=2)
    result = simulate(scheduler(), source, PerStep())
    assert len(result.requests) == 50
    assert max(len(step.slots) + step.waiting for step in result.steps) == 3
    by_user: dict[str, list[float]] = {}
    for request in result.requests:
        by_user.setdefault(request.arrival.key, []).append(request.arrival.time_s)
        assert request.finish_s is not None
    assert len(by_user) == 3
    assert result.wall_s > 5.0 * (50 / 3 - 1)


def test_a_shared_prefix_is_found() -> None:
    prompt = tuple(range(100, 148))
    arrivals = [Arrival(10.0 * i, 50, 4, token_ids=(*prompt, i, i)) for i in range(4)]
    stats = simulate(scheduler(), arrivals, PerStep()).summary()
    assert stats["prefix_hit_tokens"] == 3 * 48
    fresh = simulate(scheduler(), at_once(4, prompt=fixed(50), output=fixed(4)), PerStep())
    assert fresh.summary()["prefix_hit_tokens"] == 0


def test_a_small_pool_preempts_and_all_finish() -> None:
    limits = {"pages": 17, "page_size": 4, "max_model_len": 60}
    result = simulate(
        scheduler(**limits), at_once(8, prompt=fixed(20), output=fixed(30)), PerStep()
    )
    assert result.summary()["preemptions"] > 0
    assert sum(len(step.preempted) for step in result.steps) == result.summary()["preemptions"]
    assert [len(request.token_times_s) for request in result.requests] == [30] * 8


def test_a_dynamic_batch_waits_for_its_window() -> None:
    clock = VirtualClock()
    policy = Dynamic(2.0, clock)
    arrivals = [Arrival(1.0, 8, 3), Arrival(2.5, 8, 3), Arrival(3.25, 8, 3)]
    result = simulate(scheduler(policy), arrivals, PerStep(), clock=clock)
    first, second, third = (request.start_s for request in result.requests)
    assert first == second == 3.0  # the window opened with the first
    assert third == pytest.approx(8.0)  # after the batch, which ends at 6, a window of its own


def test_who_holds_which_slot() -> None:
    limits = {"token_budget": 8, "max_prefill_tokens": 4, "max_num_seqs": 2}
    arrivals = [Arrival(0.0, 4, 4), Arrival(0.0, 8, 2), Arrival(0.0, 1, 1)]
    result = simulate(scheduler(**limits), arrivals, PerStep())
    a, b, c = (f"request-{i}/0" for i in (1, 2, 3))
    assert [step.slots for step in result.steps] == [
        ((0, a, "prefill"),),
        ((0, a, "decode"), (1, b, "prefill")),
        ((0, a, "decode"), (1, b, "prefill")),
        ((0, a, "decode"), (1, b, "decode")),
        ((0, c, "prefill"),),
    ]
    assert [step.waiting for step in result.steps] == [2, 1, 1, 1, 0]
    lines = list(result.step_lines())
    assert json.loads(json.dumps(lines[1]))["slots"] == [[0, a, "decode"], [1, b, "prefill"]]


def test_measured_steps_are_reported_back() -> None:
    seen: list[tuple[int, float]] = []
    simulate(
        scheduler(),
        [Arrival(0.0, 8, 3)],
        PerStep(0.5),
        observe=lambda work, seconds: seen.append((work.rows, seconds)),
    )
    assert seen == [(0, 0.5), (1, 0.5), (1, 0.5)]


# Figures


def test_percentiles_are_linear_between_values() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, q) for q in (0, 50, 90, 100)] == [1.0, 2.5, pytest.approx(3.7), 4.0]
    assert percentile([7.0], 99) == 7.0


def test_figures_of_a_small_run() -> None:
    arrivals = [Arrival(0.0, 16, 3), Arrival(0.0, 16, 5)]
    buckets = Buckets(rows=(1, 4), chunks=(64,))
    bounds = Bounds(ttft_s=1.5, tpot_s=1.0)
    result = simulate(scheduler(), arrivals, PerStep(), buckets=buckets, bounds=bounds)
    report = result.summary()
    assert report["output_tokens"] == 8
    assert report["wall_s"] == 5.0
    assert report["output_tokens_per_s"] == 1.6
    assert report["slot_utilisation"] == 8 / (5 * 4)
    # A mixed step of 4 + 64 rows with 32 tokens, two decode steps of 4 rows with 2, two of one.
    assert report["padded_share"] == pytest.approx(1 - (32 + 4 + 2) / (68 + 8 + 2))
    assert report["goodput_share"] == 1.0
    assert report["goodput_requests_per_s"] == 0.4
    assert report["itl_p99_s"] == 1.0
    assert (report["e2e_mean_s"], report["e2e_p50_s"]) == (4.0, 4.0)
    assert report["device_busy_share"] == 1.0
    strict = simulate(scheduler(), arrivals, PerStep(), bounds=Bounds(ttft_s=0.5))
    assert strict.summary()["goodput_share"] == 0.0


def test_bounds_that_are_not_given_are_not_missed() -> None:
    assert Bounds(tpot_s=1.0).hold(ttft_s=9.0, tpot_s=None)
    assert not Bounds(tpot_s=1.0).hold(ttft_s=9.0, tpot_s=1.5)
    assert not Bounds(tpot_s=1.0).hold(ttft_s=None, tpot_s=None)
    assert not Bounds().any


def test_an_empty_trace_has_no_figures() -> None:
    report = simulate(scheduler(), [], PerStep()).summary()
    assert report["num_requests"] == 0
    assert report["slot_utilisation"] is None
    assert report["ttft_p99_s"] is None


def test_cost_of_a_million_tokens() -> None:
    assert cost_per_million_tokens(3.6, 1000.0) == pytest.approx(1.0)
    assert cost_per_million_tokens(None, 1000.0) is None
    assert cost_per_million_tokens(3.6, None) is None


# What is published elsewhere


def utilisation(
    admission: AdmissionPolicy, arrivals: list[Arrival], slots: int = 16
) -> dict[str, Any]:
    limits = {"max_num_seqs": slots, "token_budget": 2048, "max_prefill_tokens": 1024}
    return run(admission, arrivals, **limits).summary()


def run(admission: AdmissionPolicy, arrivals: list[Arrival], **limits: Any) -> Simulation:
    return simulate(scheduler(admission, **limits), arrivals, PerStep(), record_slots=False)


def test_static_batches_of_three_lengths_use_a_third_of_the_slots() -> None:
    """10, 50 and 1,000 tokens: 1,060 of 3 x 1,000, which is 35.3 %."""
    arrivals = [Arrival(0.0, 16, length) for length in (10, 50, 1000)]
    report = utilisation(Static(), arrivals, slots=3)
    assert report["steps"] == 1000
    assert report["slot_utilisation"] == 1060 / 3000


def both(draw: Callable[[random.Random], int]) -> tuple[float, float]:
    arrivals = at_once(640, prompt=fixed(32), output=draw, seed=0)
    static = utilisation(Static(), arrivals)["slot_utilisation"]
    continuous = utilisation(Continuous(), arrivals)["slot_utilisation"]
    return static, continuous


def test_slot_utilisation_of_even_lengths() -> None:
    """640 requests of 100 tokens +-20 % on 16 slots; published: about 85 % and above 95 %."""
    static, continuous = both(uniform(80, 120))
    assert static == pytest.approx(0.85, abs=0.02)
    assert continuous > 0.95


def test_the_gap_grows_with_the_tail() -> None:
    even, heavy = both(uniform(80, 120)), both(pareto(20, 2000, 1.1))
    assert heavy[1] - heavy[0] > 2 * (even[1] - even[0])
    assert heavy[0] < 0.5


@pytest.mark.parametrize("multi_step", [1, 4])
def test_pages_waste_half_a_page_of_a_sequence(multi_step: int) -> None:
    """Published: contiguous reservation to the maximum length wastes 60 to 80 %."""
    arrivals = poisson(400, 0.5, prompt=uniform(200, 400), output=uniform(50, 500), seed=7)
    slots = {"max_num_seqs": 16, "multi_step": multi_step, "max_model_len": 1024}
    report = run(Continuous(), arrivals, **slots).summary()
    assert report["kv_waste_tokens_per_seq"] == pytest.approx((16 - 1) / 2, abs=1.0)
    assert report["kv_waste"] < 0.04
    assert 0.5 < report["kv_waste_if_reserved"] < 0.8


def test_shared_pages_are_held_once() -> None:
    prompt = tuple(range(64))
    arrivals = [Arrival(float(i > 0) * 2, 64, 40, token_ids=prompt) for i in range(4)]
    result = simulate(scheduler(), arrivals, PerStep())
    apart = simulate(scheduler(), at_once(4, prompt=fixed(64), output=fixed(40)), PerStep())
    peak = max(step.held_pages for step in result.steps)
    assert peak < max(step.held_pages for step in apart.steps)

"""Latency bounds: the batch and the chunks that keep a predicted step within them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from scheduler import BlockPool, Scheduler, StepPlan
from scheduler.step_time import FittedCost, StepWork
from tests.scheduler.harness import Harness, make_config


@dataclass
class LinearCost:
    """A device whose times are known."""

    per_row_s: float = 0.0
    per_chunk_token_s: float = 0.0
    per_kv_token_s: float = 0.0
    asked: list[StepWork] = field(default_factory=list)

    def seconds(self, work: StepWork) -> float:
        self.asked.append(work)
        return work.num_steps * (
            self.per_row_s * work.rows
            + self.per_chunk_token_s * work.chunk_tokens
            + self.per_kv_token_s * work.kv_tokens
        )


def bounded(cost: LinearCost | FittedCost, tpot_s: float, **limits: Any) -> Harness:
    limits = {"max_num_seqs": 16, "num_pages": 600, "max_model_len": 256, **limits}
    return Harness(cost=cost, target_tpot_s=tpot_s, **limits)


def drain_plans(harness: Harness) -> list[StepPlan]:
    plans = []
    while harness.scheduler.has_work:
        plans.append(harness.step())
    harness.drain()
    return plans


def test_so_many_sequences_run_that_a_decode_step_keeps_the_bound() -> None:
    harness = bounded(LinearCost(per_row_s=1.0), 5.0)
    for _ in range(30):
        harness.add(2, max_tokens=40)
    plans = drain_plans(harness)
    assert max(len(plan.entries) for plan in plans) == 5


def test_keys_cached_count() -> None:
    """Ten tokens each at first: the fifth would bring the keys above 49."""
    harness = bounded(LinearCost(per_kv_token_s=1.0), 49.0)
    for _ in range(8):
        harness.add(10, max_tokens=2)
    plans = drain_plans(harness)
    assert max(len(plan.entries) for plan in plans) == 4


def test_the_batch_grows_only_as_far_as_times_were_seen() -> None:
    """From one sequence on, to twice what the results of a decode step have shown."""
    harness = bounded(LinearCost(), 1.0)
    for _ in range(16):
        harness.add(2, max_tokens=20)
    assert [len(harness.step().entries) for _ in range(8)] == [2, 2, 4, 4, 8, 8, 16, 16]
    harness.drain()


def test_a_chunk_is_as_large_as_the_bound_allows() -> None:
    harness = bounded(LinearCost(per_row_s=1.0, per_chunk_token_s=0.5), 10.0, min_prefill_tokens=2)
    for _ in range(2):
        harness.add(2, max_tokens=60)
    harness.step()
    harness.step()
    harness.add(100, max_tokens=2)
    chunks = [harness.step().num_chunk_tokens for _ in range(6)]
    # At most twice what was seen (two prompts of two); then (10 s - 2 rows x 1 s) / 0.5 s.
    assert chunks == [8, 16, 16, 16, 16, 16]
    harness.drain()


def test_nobody_decodes_so_a_prompt_has_the_whole_budget() -> None:
    harness = bounded(LinearCost(per_chunk_token_s=1.0), 1.0)
    harness.add(100, max_tokens=1)
    assert [harness.step().num_chunk_tokens for _ in range(2)] == [64, 36]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_bound_that_nothing_keeps_stops_nothing(mixed: bool, asynchronous: bool) -> None:
    """One sequence runs, or all that run already; a least chunk advances in every step."""
    harness = bounded(LinearCost(1.0, 1.0, 1.0), 0.001, mixed=mixed, min_prefill_tokens=3)
    for _ in range(3):
        harness.add(30, max_tokens=4)
    sizes = [len(harness.async_step().entries) for _ in range(8)]
    assert max(sizes) == 1
    harness.drain(asynchronous=asynchronous)


def test_the_least_chunk_advances_beside_decodes() -> None:
    cost = LinearCost()
    harness = bounded(cost, 1.0, min_prefill_tokens=3)
    harness.add(2, max_tokens=40)
    harness.step()
    harness.add(12, max_tokens=2)
    cost.per_chunk_token_s = 1.0
    assert [harness.step().num_chunk_tokens for _ in range(4)] == [3, 3, 3, 3]
    harness.drain()


def test_without_mixed_steps_the_chunk_alone_keeps_the_bound() -> None:
    harness = bounded(LinearCost(per_row_s=1.0, per_chunk_token_s=1.0), 4.0, mixed=False)
    harness.add(2, max_tokens=40)
    harness.step()
    harness.step()
    harness.add(12, max_tokens=2)
    plans = [harness.step() for _ in range(3)]
    assert [(p.num_chunk_tokens, p.num_decode_tokens) for p in plans] == [(4, 0)] * 3
    harness.drain()


def test_a_dispatch_is_short_enough_for_who_comes_next() -> None:
    """Two dispatches in flight take at most half of the bound on the first token."""
    for ttft_s, num_steps in [(100.0, 8), (16.0, 4), (9.0, 2), (1.0, 1)]:
        harness = Harness(cost=LinearCost(per_row_s=1.0), target_ttft_s=ttft_s, multi_step=8)
        harness.add(4, max_tokens=20)
        harness.step()
        assert harness.step().num_steps == num_steps
        harness.drain()


def test_a_fitted_cost_learns_the_bound() -> None:
    """Times come from measured steps alone: rows cost 1 ms each, and 20 ms are the bound."""
    cost = FittedCost()
    harness = bounded(cost, 0.020, max_num_seqs=64, token_budget=128, num_pages=2000)
    for _ in range(80):
        harness.add(2, max_tokens=60)
    sizes = []
    while harness.scheduler.has_work:
        plan = harness.step()
        cost.record(StepWork.of(plan), 0.001 * len(plan.entries) + 1e-6)
        sizes.append(len(plan.entries))
    harness.drain()
    assert 18 <= max(sizes) <= 21


@pytest.mark.parametrize("name", ["target_ttft_s", "target_tpot_s"])
def test_a_bound_needs_a_model_of_times(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=1.0 needs a model of step times"):
        Scheduler(make_config(**{name: 1.0}), BlockPool(65, 4))
    with pytest.raises(ValueError, match=f"{name}=-1 must be positive"):
        make_config(**{name: -1})


def test_the_least_chunk_is_within_the_most() -> None:
    with pytest.raises(ValueError, match="min_prefill_tokens=9 must be from 1 to"):
        make_config(max_prefill_tokens=8, min_prefill_tokens=9)

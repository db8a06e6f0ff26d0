"""Preempted sequences whose pages go to the host and come back."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import Status, SwapSpace
from tests.scheduler.harness import Harness, make_config


def crowded(preemption: str, num_host_pages: int = 64, **limits: Any) -> Harness:
    """Four sequences of 24 tokens in a pool that holds two of them and a half."""
    harness = Harness(
        num_pages=16,
        num_host_pages=num_host_pages,
        preemption=preemption,
        max_model_len=32,
        enable_prefix_caching=False,
        **limits,
    )
    for _ in range(4):
        harness.add(8, 16)
    return harness


def run(harness: Harness, *, asynchronous: bool = False) -> int:
    """Run to the end; the tokens that were computed, those computed again included."""
    computed = 0
    while harness.scheduler.has_work:
        plan = harness.async_step() if asynchronous else harness.step()
        computed += sum(entry.count for entry in plan.entries)
    harness.drain()
    return computed


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("multi_step", [1, 4])
def test_a_swapped_sequence_computes_nothing_twice(asynchronous: bool, multi_step: int) -> None:
    harness = crowded("swap", multi_step=multi_step)
    computed = run(harness, asynchronous=asynchronous)
    stats = harness.scheduler.stats
    assert stats.num_preemptions == stats.num_swaps > 0
    assert computed == 4 * (8 + 15)


def test_recomputing_does() -> None:
    harness = crowded("recompute")
    assert run(harness) > 4 * (8 + 15)
    assert harness.scheduler.stats.num_swaps == 0


def test_a_full_space_falls_back_to_recomputing() -> None:
    harness = crowded("swap", num_host_pages=4)
    for _ in range(4):
        harness.add(8, 16)
    assert run(harness) > 8 * (8 + 15)
    assert 0 < harness.scheduler.stats.num_swaps < harness.scheduler.stats.num_preemptions


def test_what_costs_more_is_not_swapped() -> None:
    """A page of 4 tokens that takes as long as 3 is worth it where all of it is used."""
    cheap, dear = crowded("auto", page_cost_tokens=3.0), crowded("auto", page_cost_tokens=5.0)
    run(cheap)
    run(dear)
    assert cheap.scheduler.stats.num_swaps > 0
    assert dear.scheduler.stats.num_swaps == 0


def preempted(harness: Harness) -> Any:
    """Step until a sequence waits with its pages on the host."""
    while True:
        harness.step()
        for request in harness.requests:
            if request.seq.status is Status.PREEMPTED:
                assert request.seq.num_swapped > 0
                return request.seq


def test_an_abort_gives_the_host_pages_back() -> None:
    harness = crowded("swap", num_host_pages=8)
    seq = preempted(harness)
    harness.scheduler.abort(seq)
    harness.scheduler.check()
    assert not seq.host_pages
    harness.drain()


def test_new_weights_make_saved_pages_useless() -> None:
    harness = crowded("swap")
    seq = preempted(harness)
    harness.change_weights()
    assert seq.num_swapped == 0
    while seq.status is Status.PREEMPTED:
        plan = harness.step()
    assert not plan.swapped_in
    assert next(entry for entry in plan.entries if entry.seq is seq).start == 0
    harness.drain()


def test_a_prefix_that_is_still_cached_is_not_copied_back() -> None:
    harness = Harness(num_pages=9, num_host_pages=16, preemption="swap", max_model_len=32)
    shared = list(range(16))
    harness.add(shared, 12)
    harness.add([*shared, 99], 12)
    copied = 0
    while harness.scheduler.has_work:
        plan = harness.step()
        copied += sum(len(copy.pages) for copy in plan.swapped_in)
    harness.drain()
    saved = harness.scheduler.stats.num_swaps
    assert saved > 0
    assert copied <= 2 * saved  # 4 pages of each are the shared prefix


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="preemption='swop' is not one of recompute, swap, auto"):
        make_config(preemption="swop")
    with pytest.raises(ValueError, match="num_pages=-1; it must be at least 0"):
        SwapSpace(-1)

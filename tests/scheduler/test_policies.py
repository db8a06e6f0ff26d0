"""Batching policies and prefill control: who joins when, and how many steps that takes."""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scheduler import (
    AdmissionPolicy,
    BlockPool,
    Continuous,
    Dynamic,
    Scheduler,
    SchedulerConfig,
    Sequence,
    Static,
    StepPlan,
)
from tests.scheduler.harness import Harness

WORKLOAD = json.loads((Path(__file__).parents[1] / "smollm2" / "workload.json").read_text())
LENGTHS = [(len(request["prompt_token_ids"]), request["max_tokens"]) for request in WORKLOAD]
BUDGET = 512

POLICIES: dict[str, Callable[[], AdmissionPolicy]] = {
    "continuous": Continuous,
    "static": Static,
    "dynamic": lambda: Dynamic(1.0, lambda: 0.0),
}
STEPS = {
    # (policy, slots): steps of the whole workload, prefill steps included; synchronous, and with
    # one step in flight, where a slot is free one step later
    ("continuous", 16): (505, 510),
    ("continuous", 32): (338, 340),
    ("static", 16): (1037, 1037),
    ("static", 32): (527, 527),
}


def make_scheduler(admission: AdmissionPolicy, slots: int, **limits: Any) -> Scheduler:
    """With the budget of the real engine's defaults and pages for all."""
    config = SchedulerConfig(
        max_num_seqs=slots,
        token_budget=BUDGET,
        max_prefill_tokens=BUDGET,
        max_model_len=1024,
        **limits,
    )
    return Scheduler(config, BlockPool(1 + slots * 16, 64), admission)


def run_all(scheduler: Scheduler, *, asynchronous: bool) -> list[StepPlan]:
    """Plans until nothing is left, but for the empty ones, which no device would see."""
    plans: list[StepPlan] = []
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_work or in_flight:
        if plan := scheduler.schedule():
            plans.append(plan)
            in_flight.append(plan)
        while len(in_flight) > (1 if asynchronous and plan else 0):
            done = in_flight.popleft()
            scheduler.update(done, [[0] * entry.num_samples for entry in done.entries])
    return plans


def run_workload(policy: str, slots: int, *, asynchronous: bool, **limits: Any) -> list[StepPlan]:
    scheduler = make_scheduler(POLICIES[policy](), slots, **limits)
    for number, (num_prompt, max_tokens) in enumerate(LENGTHS):
        scheduler.add(Sequence(f"{number}", [number] * num_prompt, max_tokens))
    return run_all(scheduler, asynchronous=asynchronous)


def replayed_steps(slots: int, *, static: bool, asynchronous: bool) -> int:
    """The number of steps by the rules alone, without pages, plans or a scheduler.

    A sequence computes its prompt out of what the decodes leave of the budget, samples its first
    token with its last prompt token and then one per step.  Its slot is free in the step after
    its last token, or, asynchronously, one step later.
    """
    waiting = deque([prompt, output] for prompt, output in LENGTHS)
    running: list[list[int]] = []
    ended: list[list[int]] = []  # whose end the host does not know yet
    places = num_steps = 0
    while waiting or running:
        if not asynchronous:
            running = [seq for seq in running if seq[1] > 0]
        else:
            running = [seq for seq in running if not any(seq is one for one in ended)]
            ended = [seq for seq in running if seq[1] == 0]
        if static and not running:
            places = min(len(waiting), slots)
        budget = BUDGET - sum(prompt == 0 and output > 0 for prompt, output in running)
        busy = False
        for seq in list(running):
            if seq[0] == 0 and seq[1] > 0:
                seq[1] -= 1
                busy = True
            elif seq[0] > 0:
                budget, busy = _prefill(seq, budget), True
        while budget > 0 and waiting and len(running) < slots and (places > 0 or not static):
            running.append(waiting.popleft())
            places -= 1
            budget, busy = _prefill(running[-1], budget), True
        num_steps += busy
    return num_steps


def _prefill(seq: list[int], budget: int) -> int:
    count = min(seq[0], budget)
    seq[0] -= count
    seq[1] -= seq[0] == 0 and count > 0
    return budget - count


# The workload, with exact counts


def longest_outputs(slots: int) -> int:
    """Decode steps of static batches in order of arrival: the longest output of each."""
    batches = [LENGTHS[first : first + slots] for first in range(0, len(LENGTHS), slots)]
    return sum(max(output for _, output in batch) for batch in batches)


def ideal_steps(slots: int) -> int:
    """Decode steps if whoever is next takes the slot that is free first, and prompts cost none."""
    ends = [0] * slots
    for _, output in LENGTHS:
        heapq.heapreplace(ends, ends[0] + output)
    return max(ends)


def test_the_workload_is_the_one_that_the_counts_are_of() -> None:
    assert (longest_outputs(16), longest_outputs(32)) == (1024, 512)
    assert (ideal_steps(16), ideal_steps(32)) == (505, 336)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("policy", "slots"), STEPS)
def test_exact_steps_of_the_workload(policy: str, slots: int, asynchronous: bool) -> None:
    plans = run_workload(policy, slots, asynchronous=asynchronous)
    assert len(plans) == STEPS[policy, slots][asynchronous]
    static = policy == "static"
    assert len(plans) == replayed_steps(slots, static=static, asynchronous=asynchronous)
    assert sum(sum(e.num_samples for e in plan.entries) for plan in plans) == 5936
    assert sum(plan.num_chunk_tokens for plan in plans) == sum(prompt for prompt, _ in LENGTHS)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("slots", "least"), [(16, 1.8), (32, 1.3)])
def test_continuous_batching_takes_far_fewer_steps(
    slots: int, least: float, asynchronous: bool
) -> None:
    static, continuous = (
        len(run_workload(policy, slots, asynchronous=asynchronous))
        for policy in ("static", "continuous")
    )
    assert static / continuous >= least


@pytest.mark.parametrize("slots", [16, 32])
def test_full_dynamic_batches_are_static_ones(slots: int) -> None:
    """All wait from the start and fill their batches, so that no window is ever waited for."""
    dynamic = run_workload("dynamic", slots, asynchronous=True)
    static = run_workload("static", slots, asynchronous=True)
    assert [plan_of_counts(plan) for plan in dynamic] == [plan_of_counts(plan) for plan in static]


def plan_of_counts(plan: StepPlan) -> list[tuple[str, int]]:
    return [(entry.seq.seq_id, entry.count) for entry in plan.entries]


@pytest.mark.parametrize("multi_step", [4])
@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_several_steps_per_plan_are_as_many_steps(policy: str, multi_step: int) -> None:
    single = run_workload(policy, 16, asynchronous=False)
    plans = run_workload(policy, 16, asynchronous=False, multi_step=multi_step)
    assert sum(plan.num_steps for plan in plans) == len(single)
    assert len(plans) < len(single)


# Static batches


def test_a_batch_that_is_placed_over_several_steps_stays_one_batch() -> None:
    """Its first sequence has ended before its second has a slot, and a third has come."""
    harness = Harness(token_budget=4, max_prefill_tokens=4, admission=Static())
    batch = [harness.add(4, max_tokens=max_tokens).seq for max_tokens in (1, 3)]
    harness.step()
    late = harness.add(3, max_tokens=1).seq
    assert [harness.step().admitted for _ in range(4)] == [(batch[1],), (), (), (late,)]
    harness.drain()


def test_a_window_does_not_open_within_a_batch() -> None:
    harness = Harness(
        max_num_seqs=4,
        token_budget=4,
        max_prefill_tokens=4,
        admission=Dynamic(1.0, lambda: 0.0),
    )
    for _ in range(4):
        harness.add(4, max_tokens=1)
    assert [len(harness.step().admitted) for _ in range(4)] == [1, 1, 1, 1]


def test_a_preempted_sequence_is_still_of_its_batch() -> None:
    harness = Harness(num_pages=5, page_size=4, max_model_len=17, admission=Static())
    older, younger = harness.add(8, max_tokens=2), harness.add(8, max_tokens=5)
    harness.step()
    late = harness.add(1, max_tokens=2)
    assert harness.step().preempted == (younger.seq,)
    assert older.seq.finish_reason is not None
    assert harness.step().admitted == (younger.seq,)
    while younger.seq.finish_reason is None:
        assert not harness.step().admitted
    assert harness.step().admitted == (late.seq,)
    harness.drain()


def test_an_open_window_says_how_long_it_lasts() -> None:
    now = 5.0
    harness = Harness(max_num_seqs=2, admission=Dynamic(1.0, lambda: now))
    assert harness.scheduler.wait_s == 0.0
    request = harness.add(2, max_tokens=3)
    assert harness.step().is_empty
    assert harness.scheduler.wait_s == 1.0
    now = 5.75
    assert harness.scheduler.wait_s == 0.25
    now += harness.scheduler.wait_s
    assert harness.step().admitted == (request.seq,)
    assert harness.scheduler.wait_s == 0.0
    harness.drain()


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_without_a_window_nothing_is_waited_for(policy: str) -> None:
    harness = Harness(admission=POLICIES[policy]())
    harness.add(2)
    assert harness.scheduler.wait_s == 0.0


# Prefill and decode, mixed or apart


def test_without_mixed_steps_prefills_come_first_and_decodes_wait() -> None:
    harness = Harness(mixed=False, token_budget=8, max_prefill_tokens=8)
    harness.add(4, max_tokens=4)
    assert plan_of_counts(harness.step()) == [("seq-0", 4)]
    assert plan_of_counts(harness.step()) == [("seq-0", 1)]
    harness.add(12, max_tokens=2)
    assert plan_of_counts(harness.step()) == [("seq-1", 8)]
    harness.add(2, max_tokens=2)
    assert plan_of_counts(harness.step()) == [("seq-1", 4), ("seq-2", 2)]
    assert plan_of_counts(harness.step()) == [("seq-0", 1), ("seq-1", 1), ("seq-2", 1)]
    harness.drain()


def test_without_mixed_steps_prefills_have_the_whole_budget() -> None:
    harness = Harness(mixed=False, max_num_seqs=4, token_budget=8, max_prefill_tokens=8)
    for _ in range(3):
        harness.add(1, max_tokens=9)
    harness.step()
    harness.add(8, max_tokens=1)
    assert plan_of_counts(harness.step()) == [("seq-3", 8)]
    harness.drain()


def test_without_mixed_steps_a_prefill_that_has_to_yield_lets_the_decodes_run() -> None:
    harness = Harness(mixed=False, num_pages=8, page_size=2, max_model_len=15, max_prefill_tokens=2)
    first = harness.add(2, max_tokens=9)
    for _ in range(3):
        harness.step()
    harness.add(8, max_tokens=2)
    harness.drain()
    assert first.seq.num_preemptions == 0


CHUNK = 16


def long_prompt_among_four(*, mixed: bool, asynchronous: bool = False) -> list[list[int]]:
    """Gaps in steps between the tokens of four streams while a prompt of 32 chunks arrives."""
    harness = Harness(
        max_num_seqs=5,
        token_budget=CHUNK + 4,
        max_prefill_tokens=CHUNK,
        num_pages=200,
        max_model_len=700,
        mixed=mixed,
    )
    streams = [harness.add(4, max_tokens=60) for _ in range(4)]
    harness.step()
    harness.step()
    harness.add(32 * CHUNK, max_tokens=4)
    last = dict.fromkeys((stream.seq for stream in streams), 0)
    gaps: list[list[int]] = [[] for _ in streams]
    step = 0
    while harness.scheduler.has_work:
        plan = harness.async_step() if asynchronous else harness.step()
        step += bool(plan)
        for entry in plan.entries:
            if entry.seq in last:
                gaps[int(entry.slot)].append(step - last[entry.seq])
                last[entry.seq] = step
    harness.drain(asynchronous=asynchronous)
    return gaps


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_long_prompt_stalls_no_stream_for_more_than_a_mixed_step(asynchronous: bool) -> None:
    for gaps in long_prompt_among_four(mixed=True, asynchronous=asynchronous):
        assert len(gaps) == 58
        assert max(gaps) == 1


def test_without_mixed_steps_the_stall_is_there() -> None:
    for gaps in long_prompt_among_four(mixed=False):
        assert len(gaps) == 58
        assert sorted(gaps)[-2:] == [1, 33]  # 32 chunks, then the next token


def test_mixed_steps_make_the_same_tokens_as_steps_apart() -> None:
    """The workload's plans compute the same, in more steps."""
    apart = run_workload("continuous", 16, asynchronous=True, mixed=False)
    assert len(apart) > STEPS["continuous", 16][True]
    assert not any(plan.num_chunk_tokens and plan.num_decode_tokens for plan in apart)
    assert sum(sum(e.num_samples for e in plan.entries) for plan in apart) == 5936


# Memory


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_two_long_requests_in_a_pool_of_little_more_than_one(
    mixed: bool, asynchronous: bool
) -> None:
    """Each ends; the younger yields once, and then waits until the older has ended."""
    length = 80
    pages = -(-(length - 1) // 4)
    harness = Harness(
        num_pages=1 + int(1.05 * pages),
        page_size=4,
        max_model_len=length,
        mixed=mixed,
    )
    older, younger = (harness.add(20, max_tokens=60) for _ in range(2))
    harness.drain(asynchronous=asynchronous)
    assert older.seq.num_output == younger.seq.num_output == 60
    assert older.seq.num_preemptions == 0
    assert younger.seq.num_preemptions == 1

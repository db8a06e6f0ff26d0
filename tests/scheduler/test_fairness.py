"""Ageing of priorities, fair share among keys, and the queues behind them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import BlockPool, Scheduler, Sequence, Static
from scheduler.fair_share import OUTPUT_WEIGHT, FairQueue
from scheduler.queues import RankHeap
from tests.scheduler.device import Request
from tests.scheduler.harness import Harness, make_config


class Clock:
    """Virtual time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# Ageing


def aged(ageing_s: float | None, **limits: Any) -> tuple[Harness, Clock]:
    clock = Clock()
    limits = {"max_num_seqs": 1, "policy": "priority", "priority_ageing_s": ageing_s, **limits}
    return Harness(clock=clock, **limits), clock


def ends(harness: Harness, num_steps: int) -> list[str]:
    """Sequences in the order in which they end."""
    before = {request.seq for request in harness.requests if request.seq.finish_reason}
    order = []
    for _ in range(num_steps):
        harness.step()
        for request in harness.requests:
            if request.seq.finish_reason and request.seq not in before:
                before.add(request.seq)
                order.append(request.seq.seq_id)
    return order


@pytest.mark.parametrize(
    ("waited_s", "first"),
    [(19.0, "seq-1"), (21.0, "seq-0")],
)
def test_two_levels_are_gained_in_twice_the_time(waited_s: float, first: str) -> None:
    harness, clock = aged(10.0)
    harness.add(2, max_tokens=1, priority=2)
    clock.now = waited_s
    harness.add(2, max_tokens=1, priority=0)
    assert ends(harness, 2)[0] == first


def test_equals_stay_in_order_of_arrival() -> None:
    harness, _ = aged(10.0)
    for _ in range(4):
        harness.add(2, max_tokens=1, priority=1)
    assert ends(harness, 4) == ["seq-0", "seq-1", "seq-2", "seq-3"]


@pytest.mark.parametrize(("ageing_s", "is_starved"), [(None, True), (5.0, False)])
def test_ageing_ends_the_starvation_of_the_lowest_priority(
    ageing_s: float | None, is_starved: bool
) -> None:
    """One urgent request per step, each of a step, and one slot."""
    harness, clock = aged(ageing_s)
    patient = harness.add(2, max_tokens=1, priority=3)
    for _ in range(40):
        harness.add(2, max_tokens=1, priority=0)
        harness.step()
        clock.now += 1.0
    assert (patient.seq.finish_reason is None) == is_starved
    harness.drain()


def test_a_preempted_sequence_keeps_its_rank() -> None:
    harness, clock = aged(10.0, max_num_seqs=2, num_pages=5, page_size=4, max_model_len=17)
    harness.add(8, max_tokens=5, priority=0)
    younger = harness.add(8, max_tokens=5, priority=0)
    harness.step()
    rank = younger.seq.rank
    clock.now = 30.0
    assert harness.step().preempted == (younger.seq,)
    assert younger.seq.rank == rank
    urgent = harness.add(1, max_tokens=1, priority=-2)  # two levels above, three levels later
    while harness.scheduler.num_running:
        harness.step()
    assert harness.step().admitted == (younger.seq, urgent.seq)
    harness.drain()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_aged_sequences_all_end_in_tight_memory(asynchronous: bool) -> None:
    harness, clock = aged(
        4.0, max_num_seqs=4, num_pages=13, page_size=2, max_model_len=25, token_budget=8,
        max_prefill_tokens=8,
    )  # fmt: skip
    for number in range(12):
        harness.add(3 + number % 5, max_tokens=10, priority=number % 3)
        clock.now += 1.0
        harness.step()
    harness.drain(asynchronous=asynchronous)
    assert harness.scheduler.stats.num_preemptions > 0


def test_ageing_needs_priorities_and_a_clock() -> None:
    with pytest.raises(ValueError, match=r"priority_ageing_s=1\.0 needs policy='priority'"):
        make_config(priority_ageing_s=1.0)
    with pytest.raises(ValueError, match=r"priority_ageing_s=0\.0 must be positive"):
        make_config(priority_ageing_s=0.0, policy="priority")
    config = make_config(priority_ageing_s=1.0, policy="priority")
    with pytest.raises(ValueError, match="needs a clock"):
        Scheduler(config, BlockPool(65, 4))


# Fair share


def run_shared(
    harness: Harness, others: dict[str, list[Request]], num_steps: int
) -> dict[str, int]:
    """Output tokens of each key after so many steps."""
    for _ in range(num_steps):
        harness.step()
    return {key: sum(r.seq.num_output for r in requests) for key, requests in others.items()}


def shared(**limits: Any) -> Harness:
    return Harness(**{"fair_share": True, "max_num_seqs": 4, "num_pages": 400, **limits})


def crowd(harness: Harness, key: str, count: int, **options: Any) -> list[Request]:
    return [harness.add(4, **{"max_tokens": 8, "key": key, **options}) for _ in range(count)]


@pytest.mark.parametrize("fair_share", [True, False])
def test_a_thousand_requests_do_not_starve_one(fair_share: bool) -> None:
    """It waits for a slot, 8 steps, and has it for 8; otherwise it waits for all of them."""
    harness = shared(fair_share=fair_share)
    crowd(harness, "many", 1000)
    harness.step()
    one = harness.add(4, max_tokens=8, key="one")
    for _ in range(15):
        harness.step()
    assert one.seq.num_output == (8 if fair_share else 0)
    for request in harness.requests:
        harness.scheduler.abort(request.seq)


def test_keys_that_always_wait_are_served_alike() -> None:
    """Whatever the number of their requests and however long each is."""
    harness = shared()
    keys = {
        "many short": crowd(harness, "many short", 400, max_tokens=2),
        "few long": crowd(harness, "few long", 60, max_tokens=30),
        "middling": crowd(harness, "middling", 120),
    }
    run_shared(harness, keys, 160)
    served = [
        sum(
            r.seq.num_prompt * (r.seq.num_output > 0) + OUTPUT_WEIGHT * r.seq.num_output
            for r in requests
        )
        for requests in keys.values()
    ]
    # The paper's bound: twice the larger of what a request asks and what runs at once.
    assert max(served) - min(served) <= 2 * 4 * (4 + OUTPUT_WEIGHT * 30)
    assert min(served) > 160
    for requests in keys.values():
        assert any(request.seq.finish_reason is None for request in requests)
        for request in requests:
            harness.scheduler.abort(request.seq)


def test_nobody_saves_up_while_away() -> None:
    """A key that comes late gets its share from now on, and nothing for the time before."""
    harness = shared(max_num_seqs=2)
    early = crowd(harness, "early", 200)
    run_shared(harness, {}, 200)
    before = sum(request.seq.num_output for request in early)
    late = crowd(harness, "late", 100)
    tokens = run_shared(harness, {"early": early, "late": late}, 100)
    assert abs((tokens["early"] - before) - tokens["late"]) <= 4 * 8
    for request in harness.requests:
        harness.scheduler.abort(request.seq)


def test_within_a_key_the_policy_decides() -> None:
    harness = shared(max_num_seqs=1, policy="priority")
    for key, priority in [("a", 1), ("a", 0), ("b", 1), ("b", 0)]:
        harness.add(2, max_tokens=1, key=key, priority=priority)
    assert ends(harness, 4) == ["seq-1", "seq-3", "seq-0", "seq-2"]


def test_one_key_is_served_as_without_fair_share() -> None:
    orders = []
    for fair_share in (False, True):
        harness = shared(fair_share=fair_share, max_num_seqs=2)
        for number in range(8):
            harness.add(3, max_tokens=1 + number % 3)
        orders.append(ends(harness, 20))
        harness.drain()
    assert orders[0] == orders[1]


def test_who_was_let_in_first_does_not_yield_to_those_passed_over() -> None:
    """By arrival the one would be the victim of each of the many; by admission of two of them."""
    harness = shared(max_num_seqs=3, num_pages=13, page_size=4, max_model_len=29)
    crowd(harness, "many", 30, max_tokens=20)
    harness.step()
    one = harness.add(4, max_tokens=20, key="one")
    while one.seq.finish_reason is None:
        harness.step()
    assert harness.scheduler.stats.num_preemptions > 0
    assert one.seq.num_preemptions <= 2
    harness.drain()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("admission", [None, Static()], ids=["continuous", "static"])
def test_all_of_all_keys_end(admission: Static | None, asynchronous: bool) -> None:
    harness = shared(num_pages=13, page_size=2, max_model_len=24, admission=admission)
    rng = random.Random(0)
    for _ in range(40):
        harness.add(rng.randint(1, 8), max_tokens=rng.randint(1, 12), key=rng.choice("abcd"))
    harness.drain(asynchronous=asynchronous)


def test_what_is_computed_again_is_not_charged_again() -> None:
    harness = shared(num_pages=5, page_size=4, max_model_len=17, enable_prefix_caching=False)
    harness.add(8, max_tokens=5, key="a")
    preempted = harness.add(8, max_tokens=5, key="b")
    harness.drain()
    assert preempted.seq.num_preemptions == 1
    queue = harness.scheduler.waiting
    assert isinstance(queue, FairQueue)
    assert queue.service("a") == 8 + OUTPUT_WEIGHT * 5
    assert queue.service("b") - 8 - OUTPUT_WEIGHT * 5 in (0, 8)  # lifted when it came back


# The queues


def make(number: int, key: str = "") -> Sequence:
    seq = Sequence(f"{number}", [1], 1, key=key)
    seq.rank = (number % 7, number)
    return seq


@given(st.lists(st.integers(0, 3), max_size=120), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_heap_is_a_sorted_list(choices: list[int], rng: random.Random) -> None:
    heap, model = RankHeap(), list[Sequence]()
    for number, choice in enumerate(choices):
        if choice < 2 or not model:
            model.append(make(number))
            heap.add(model[-1])
        else:
            model.sort(key=lambda seq: seq.rank)
            index = 0 if choice == 2 else rng.randrange(len(model))
            heap.remove(model[index])
            gone = model.pop(index)
            if rng.random() < 0.3:
                gone.rank = (rng.randint(0, 6), 1000 + number)
                model.append(gone)
                heap.add(gone)
        heap.check()
        model.sort(key=lambda seq: seq.rank)
        assert list(heap) == model
        assert len(heap) == len(model)
        assert not model or heap.first is model[0]


def test_what_was_removed_from_the_middle_is_forgotten_in_time() -> None:
    heap = RankHeap()
    seqs = [make(number) for number in range(1000)]
    for seq in seqs:
        heap.add(seq)
    first = heap.first
    for seq in seqs:
        if seq is not first:
            heap.remove(seq)
    assert len(heap._heap) <= 2 + 16
    assert heap.first is first


@given(st.lists(st.integers(0, 4), max_size=120), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_least_served_key_is_next(choices: list[int], rng: random.Random) -> None:
    queue, model = FairQueue(), list[Sequence]()
    for number, choice in enumerate(choices):
        if choice < 2 or not model:
            model.append(make(number, rng.choice("abcdef")))
            queue.add(model[-1])
        elif choice == 2:
            queue.serve(rng.choice("abcdef"), rng.randint(0, 9), rng.randint(0, 9))
        else:
            seq = queue.first if choice == 3 else rng.choice(model)
            queue.remove(seq)
            model.remove(seq)
        queue.check()
        assert list(queue) == sorted(model, key=lambda seq: seq.rank)
        if model:
            first = queue.first
            least = min(queue.service(seq.key) for seq in model)
            assert queue.service(first.key) == least
            assert first is min(
                (seq for seq in model if seq.key == first.key), key=lambda seq: seq.rank
            )


def test_counters_of_keys_that_are_gone_are_dropped() -> None:
    queue = FairQueue()
    stays = make(0, "stays")
    queue.add(stays)
    for number in range(1, 5000):
        seq = make(number, f"key {number}")
        queue.add(seq)
        queue.serve("stays", 1, 0)
        queue.remove(seq)
        queue.check()
        assert len(queue._served) <= 1024 + 2 * 2 + 1
    assert queue.first is stays

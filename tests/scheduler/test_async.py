"""Scheduling with one plan in flight: what the host does not know yet changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import FinishReason, Status
from tests.scheduler.device import Request
from tests.scheduler.harness import Harness


def test_a_decode_is_scheduled_before_its_token_is_known() -> None:
    harness = Harness()
    request = harness.add(3, max_tokens=4)
    harness.dispatch()
    assert (request.seq.num_tokens, request.seq.num_in_flight, request.seq.num_output) == (4, 1, 0)
    plan = harness.dispatch()
    [entry] = plan.entries
    assert (entry.start, entry.count, entry.is_decode, entry.samples) == (3, 1, True, True)
    assert request.seq.num_in_flight == 2
    harness.collect()
    assert (request.seq.num_in_flight, request.seq.num_output) == (1, 1)
    harness.drain(asynchronous=True)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 8])
def test_no_step_is_wasted_on_a_sequence_that_ends_by_length(max_tokens: int) -> None:
    harness = Harness()
    request = harness.add(3, max_tokens=max_tokens)
    plans = [harness.async_step() for _ in range(12)]
    assert sum(not plan.is_empty for plan in plans) == max(max_tokens, 1)
    assert request.seq.num_output == max_tokens
    harness.drain(asynchronous=True)


def test_one_token_of_a_sequence_that_stopped_is_discarded() -> None:
    harness = Harness()
    free = harness.add(3, max_tokens=9)
    harness.drain()
    request = harness.add(3, 9, seed=0, stop_ids=frozenset({free.seq.output_ids[0]}))
    harness.dispatch()
    harness.dispatch()
    assert harness.collect().finished == (request.seq,)
    assert harness.scheduler.pool.num_held == 0
    update = harness.collect()
    assert (update.accepted, update.finished) == ((), ())
    assert request.seq.num_output == 1
    assert request.seq.num_in_flight == 0


def test_a_stop_string_ends_it_with_a_step_in_flight() -> None:
    harness = Harness()
    request = harness.add(3, max_tokens=9, stops_after=4)
    harness.drain(asynchronous=True)
    assert request.seq.num_output == 4


def test_pages_and_slot_of_an_aborted_sequence_serve_another_in_the_next_step() -> None:
    harness = Harness(num_pages=5, page_size=4, max_model_len=17, max_num_seqs=1)
    gone = harness.add(14, max_tokens=3)
    harness.dispatch()
    harness.scheduler.abort(gone.seq)
    heir = harness.add(14, max_tokens=3)
    plan = harness.dispatch()
    assert plan.admitted == (heir.seq,)
    assert heir.seq.slot == 0
    harness.collect()
    # What the step in flight computed for the one that is gone was not kept.
    assert harness.scheduler.pool.num_cached == 0
    harness.drain(asynchronous=True)


def in_flight_and_preempted(**options: Any) -> tuple[Harness, Request]:
    """A sequence preempted while the step that samples its first token is in flight."""
    harness = Harness(num_pages=5, page_size=4, max_model_len=17)
    harness.add(8, max_tokens=5)
    younger = harness.add(8, **{"max_tokens": 5, **options})
    harness.dispatch()
    plan = harness.dispatch()
    assert plan.preempted == (younger.seq,)
    return harness, younger


def test_an_in_flight_token_is_kept_on_preemption() -> None:
    harness, younger = in_flight_and_preempted()
    seq = younger.seq
    assert (seq.status, seq.num_in_flight) == (Status.PREEMPTED, 1)
    update = harness.collect()
    assert (1, 1) in update.accepted
    assert (seq.num_output, seq.num_in_flight, seq.status) == (1, 0, Status.PREEMPTED)
    harness.drain(asynchronous=True)
    assert seq.num_output == 5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 1}, FinishReason.LENGTH),
        ({"stop_ids": frozenset(range(5))}, FinishReason.STOP),
        ({"max_tokens": 0}, FinishReason.LENGTH),
        ({"breaks_at": 7, "reads_prefix_cache": False}, FinishReason.ERROR),
    ],
)
def test_a_step_in_flight_can_end_a_preempted_sequence(
    options: dict[str, Any], reason: FinishReason
) -> None:
    harness, younger = in_flight_and_preempted(**options)
    assert harness.collect().finished == (younger.seq,)
    assert (younger.seq.status, younger.seq.finish_reason) == (Status.FINISHED, reason)
    harness.drain(asynchronous=True)


def test_pages_computed_by_a_step_in_flight_are_not_kept_if_they_were_taken() -> None:
    harness, _ = in_flight_and_preempted()
    harness.collect()
    # The two pages of the older are known now; those of the younger one are gone.
    assert harness.scheduler.pool.num_cached == 0
    harness.drain(asynchronous=True)


def test_a_preempted_sequence_waits_for_its_last_token_before_it_resumes() -> None:
    harness = Harness(num_pages=5, page_size=4, max_model_len=17)
    older = harness.add(7, max_tokens=2)
    younger = harness.add(8, max_tokens=5)
    harness.dispatch()
    plan = harness.dispatch()
    assert plan.preempted == (younger.seq,)
    harness.scheduler.abort(older.seq)
    assert harness.scheduler.schedule().is_empty  # there is room, but its token is unknown
    harness.collect()
    assert harness.dispatch().admitted == (younger.seq,)
    harness.drain(asynchronous=True)


def test_pages_are_shared_only_once_the_step_that_fills_them_is_back() -> None:
    harness = Harness(page_size=4)
    harness.add(list(range(9)), max_tokens=2, seed=1)
    harness.dispatch()
    early = harness.add(list(range(9)), max_tokens=2, seed=1)
    harness.dispatch()
    assert early.seq.num_cached == 0
    harness.collect()
    late = harness.add(list(range(9)), max_tokens=2, seed=1)
    harness.dispatch()
    assert late.seq.num_cached == 8
    harness.drain(asynchronous=True)


def test_a_broken_sequence_spoils_no_page_with_its_next_step_in_flight() -> None:
    harness = Harness(page_size=2)
    harness.add(list(range(5)), max_tokens=9, breaks_at=7, seed=1)
    harness.drain(asynchronous=True)
    harness.add(list(range(5)), max_tokens=9, seed=1)
    harness.drain(asynchronous=True)


def test_a_broken_chunk_in_flight_spoils_no_page() -> None:
    harness = Harness(page_size=4, token_budget=4, max_prefill_tokens=4)
    harness.add(list(range(12)), breaks_at=5, reads_prefix_cache=False)
    harness.drain(asynchronous=True)
    assert harness.scheduler.pool.num_cached == 1
    harness.add(list(range(12)), seed=1)
    harness.drain(asynchronous=True)


def test_a_reset_with_a_step_in_flight_keeps_none_of_its_pages() -> None:
    harness = Harness(page_size=4)
    harness.add(8, max_tokens=2)
    harness.dispatch()
    harness.change_weights()
    harness.collect()
    harness.drain(asynchronous=True)
    assert harness.scheduler.pool.num_cached == 0


def test_plans_must_be_updated_in_order() -> None:
    harness = Harness()
    harness.add(3, max_tokens=4)
    harness.dispatch()
    harness.dispatch()
    plan, (sampled, *_) = harness.in_flight[1]
    with pytest.raises(AssertionError, match="order"):
        harness.scheduler.update(plan, sampled)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_tight_memory_gives_the_same_outputs_as_ample_memory(policy: str) -> None:
    """Four sequences of 72 tokens in a cache of 1.3 times one of them."""
    harness = Harness(
        num_pages=13,
        page_size=8,
        max_model_len=80,
        max_num_seqs=8,
        token_budget=16,
        max_prefill_tokens=16,
        policy=policy,
    )
    requests = [harness.add(8, max_tokens=64, priority=-n) for n in range(4)]
    harness.drain(asynchronous=True)
    assert harness.scheduler.stats.num_preemptions > 0
    assert [request.seq.num_output for request in requests] == [64] * 4

"""Plans of several steps: when there are any, what they hold, and what ends them early."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import FinishReason, SchedulerConfig, StepPlan
from tests.scheduler.harness import Harness, make_config

EVERY = frozenset(range(5))
"""Stop ids that every token of the fake device is one of."""


def decoding(*max_tokens: int, multi_step: int = 8, **limits: Any) -> Harness:
    """Sequences with their prompts of 4 tokens computed."""
    harness = Harness(multi_step=multi_step, **limits)
    for count in max_tokens:
        harness.add(4, max_tokens=count)
    harness.step()
    return harness


def counts(plan: StepPlan) -> list[int]:
    return [entry.count for entry in plan.entries]


def test_as_many_steps_as_allowed() -> None:
    plan = decoding(20, 20, multi_step=3).dispatch()
    assert (plan.num_steps, counts(plan)) == (3, [3, 3])
    assert plan.num_decode_tokens == 6
    assert [entry.num_samples for entry in plan.entries] == [3, 3]


@pytest.mark.parametrize(
    ("max_tokens", "want"),
    [
        # The first token of each came with its prompt.
        ((6,), [5]),
        ((1, 6), [5]),
        ((6, 6), [5, 5]),
        ((3, 6), [2, 2]),  # one of two is not more than half
        ((3, 6, 7), [2, 5, 5]),
        ((3, 3, 7), [2, 2, 2]),
        ((2, 3, 9, 9), [1, 2, 2, 2]),
        ((20, 20, 20), [8, 8, 8]),
    ],
)
def test_most_rows_take_part_in_every_step(max_tokens: tuple[int, ...], want: list[int]) -> None:
    harness = decoding(*max_tokens)
    assert counts(harness.dispatch()) == want
    harness.drain(asynchronous=True)


def test_a_prefill_is_a_single_step() -> None:
    harness = decoding(20, token_budget=6, max_prefill_tokens=6)
    harness.add(9, max_tokens=3)
    assert [harness.step().num_steps for _ in range(3)] == [1, 1, 2]


def test_a_sequence_whose_tokens_the_host_must_see_makes_steps_single() -> None:
    harness = decoding(20)
    harness.add(4, max_tokens=6, single_step=True)
    plans = [harness.dispatch() for _ in range(6)]
    assert [plan.num_steps for plan in plans] == [1] * 6
    harness.drain()
    assert harness.requests[1].seq.num_output == 6


@pytest.mark.parametrize("options", [{"stop_ids": frozenset({99})}, {"text_may_end": True}])
def test_a_sequence_that_waits_makes_steps_single(options: dict[str, Any]) -> None:
    harness = Harness(multi_step=8, max_num_seqs=1)
    harness.add(4, max_tokens=9, **options)
    harness.add(4, max_tokens=9)
    harness.step()
    assert harness.step().num_steps == 1
    harness.drain()


def test_a_sequence_that_waits_for_a_known_end_does_not() -> None:
    harness = decoding(4, 9, 6, max_num_seqs=2)
    assert counts(harness.step()) == [3, 3]
    plan = harness.step()
    assert (plan.num_steps, len(plan.admitted)) == (1, 1)
    harness.drain()


def test_a_sequence_that_waits_for_pages_makes_steps_single() -> None:
    harness = decoding(9, num_pages=5, page_size=4, max_model_len=17)
    harness.add(14, max_tokens=2)
    assert harness.step().num_steps == 1
    harness.drain()


def test_pages_of_all_steps_are_allocated_beforehand() -> None:
    harness = decoding(9, num_pages=9, page_size=2, max_model_len=17)
    plan = harness.dispatch()
    [entry] = plan.entries
    assert (entry.count, len(entry.new_pages), entry.first_new_page) == (8, 4, 2)
    harness.drain(asynchronous=True)


def test_steps_are_fewer_before_anybody_is_preempted() -> None:
    """Two sequences that need six pages, and five of them."""
    harness = Harness(multi_step=8, num_pages=6, page_size=4, max_model_len=21)
    for _ in range(2):
        harness.add(3, max_tokens=9)
    harness.step()
    assert harness.step().num_steps == 5  # to the end of both second pages
    assert harness.scheduler.stats.num_preemptions == 0
    plan = harness.step()
    assert (plan.num_steps, len(plan.preempted)) == (1, 1)
    harness.drain()
    assert harness.scheduler.stats.num_preemptions == 1


def test_a_token_ends_a_row_for_the_rest_of_the_plan() -> None:
    harness = decoding(20)
    [request] = harness.requests
    request.seq.stop_ids = frozenset({request.token(7)})
    harness.dispatch()
    _, results = harness.in_flight[0]
    assert len(results.tokens[0]) <= 3
    assert harness.collect().finished == (request.seq,)
    assert harness.scheduler.stats.discarded_tokens == 0


@pytest.mark.parametrize(("completes_after", "reason"), [(6, "stop"), (9, "length")])
def test_what_nothing_may_follow_ends_with_what_it_has(completes_after: int, reason: str) -> None:
    harness = Harness(multi_step=4)
    request = harness.add(3, max_tokens=9, completes_after=completes_after)
    harness.drain(asynchronous=True)
    assert (request.seq.num_output, request.seq.finish_reason) == (completes_after, reason)
    assert request.seq.stop_token is None
    assert harness.scheduler.stats.discarded_tokens == 0


def test_the_device_ends_a_row_for_the_plan_after_too() -> None:
    harness = Harness(multi_step=4)
    request = harness.add(3, max_tokens=20, stop_ids=EVERY)
    harness.dispatch()
    harness.dispatch()
    assert [results.tokens for _, results in harness.in_flight] == [[[request.token(3)]], [[]]]
    harness.collect()
    assert harness.collect() == ((), ())
    assert harness.scheduler.stats.discarded_tokens == 0


def test_what_a_device_samples_in_ignorance_is_discarded() -> None:
    harness = Harness(multi_step=4)
    request = harness.add(3, max_tokens=20, stop_ids=EVERY, min_tokens=3, ends_on_device=False)
    harness.drain(asynchronous=True)
    assert request.seq.num_output == 3
    # The prompt's token, then a plan of four: two of them; and the plan in flight meanwhile.
    assert harness.scheduler.stats.discarded_tokens == 2 + 4


@pytest.mark.parametrize("stops_after", [2, 3, 5, 6])
def test_cut_drops_what_came_after(stops_after: int) -> None:
    harness = Harness(multi_step=4)
    request = harness.add(3, max_tokens=6, stops_after=stops_after)
    harness.drain()
    assert request.seq.num_output == stops_after
    assert request.seq.finish_reason is FinishReason.STOP
    assert harness.scheduler.stats.discarded_tokens == {2: 3, 3: 2, 5: 0, 6: 0}[stops_after]


def test_a_broken_step_keeps_the_tokens_and_the_pages_before_it() -> None:
    harness = Harness(multi_step=8, page_size=2)
    broken = harness.add(list(range(4)), max_tokens=20, breaks_at=9, seed=1)
    harness.drain(asynchronous=True)
    assert (broken.seq.num_output, broken.seq.finish_reason) == (6, FinishReason.ERROR)
    healthy = harness.add(broken.seq.token_ids, max_tokens=3, seed=1)
    harness.drain()
    assert healthy.seq.num_cached == 8


def test_pages_filled_in_several_steps_are_kept() -> None:
    harness = Harness(multi_step=8, page_size=2)
    request = harness.add(4, max_tokens=9)
    harness.drain()
    again = harness.add(request.seq.token_ids, max_tokens=2)
    harness.drain()
    assert again.seq.num_cached == 12


@pytest.mark.parametrize("multi_step", [0, -1])
def test_there_is_at_least_one_step(multi_step: int) -> None:
    with pytest.raises(ValueError, match=f"multi_step={multi_step} must be at least 1"):
        make_config(multi_step=multi_step)
    assert SchedulerConfig(4, 64, 64, 64).multi_step == 1

"""The rules of a step, one by one, with no step in flight."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler import (
    BlockPool,
    Continuous,
    Dynamic,
    FinishReason,
    Scheduler,
    Sequence,
    Static,
    Status,
    StepPlan,
)
from tests.scheduler.device import Request
from tests.scheduler.harness import Harness, make_config


def counts(plan: StepPlan) -> dict[str, int]:
    """Tokens of the plan by sequence."""
    return {entry.seq.seq_id: entry.count for entry in plan.entries}


# Refusals


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"token_budget": 3}, "token_budget=3 cannot give each of max_num_seqs=4"),
        ({"max_prefill_tokens": 65}, "max_prefill_tokens=65 must be from 1 to token_budget=64"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens=0"),
        ({"policy": "lifo"}, "policy='lifo' is not one of fcfs, priority"),
        (
            {"enable_chunked_prefill": False, "max_prefill_tokens": 63},
            "max_prefill_tokens=63 must be at least max_model_len=64",
        ),
    ],
)
def test_limits_that_cannot_work_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**limits)


def test_a_pool_too_small_for_the_longest_sequence_is_refused() -> None:
    config = make_config(max_model_len=22)
    Scheduler(make_config(max_model_len=21), BlockPool(6, 4))
    with pytest.raises(ValueError, match="needs 21 positions of the KV cache, which has 20"):
        Scheduler(config, BlockPool(6, 4))


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "message"),
    [
        (0, 4, "empty prompt"),
        (4, -1, "max_tokens=-1"),
        (22, 1, "22 tokens, above max_model_len=21; shorten it by 1"),
        (21, 1, "no room for an output token within max_model_len=21"),
        (21, 0, "the KV cache holds 20"),
    ],
)
def test_what_can_never_run_is_refused(num_prompt: int, max_tokens: int, message: str) -> None:
    scheduler = Scheduler(make_config(max_model_len=21), BlockPool(6, 4))
    seq = Sequence("x", [1] * num_prompt, max_tokens)
    with pytest.raises(ValueError, match=message):
        scheduler.add(seq)
    assert not scheduler.has_work
    assert seq.max_tokens == max_tokens


@pytest.mark.parametrize("num_prompt", [18, 19, 20])
@pytest.mark.parametrize("max_tokens", [1, 2, 100])
def test_output_is_cut_where_the_context_ends(num_prompt: int, max_tokens: int) -> None:
    harness = Harness(max_model_len=21, num_pages=6, page_size=4)
    request = harness.add(num_prompt, max_tokens)
    assert request.seq.max_tokens == min(max_tokens, 21 - num_prompt)
    harness.drain()
    assert request.seq.finish_reason is FinishReason.LENGTH
    assert request.seq.num_tokens == min(num_prompt + max_tokens, 21)


# Budget


def test_decodes_keep_a_token_each_and_prefills_share_the_rest() -> None:
    harness = Harness(token_budget=10, max_prefill_tokens=10)
    for _ in range(2):
        harness.add(3, max_tokens=9)
    assert counts(harness.step()) == {"seq-0": 3, "seq-1": 3}
    harness.add(12)
    harness.add(5)
    plan = harness.step()
    assert counts(plan) == {"seq-0": 1, "seq-1": 1, "seq-2": 8}
    assert (plan.num_decode_tokens, plan.num_chunk_tokens) == (2, 8)
    assert counts(harness.step()) == {"seq-0": 1, "seq-1": 1, "seq-2": 4, "seq-3": 4}
    assert counts(harness.step()) == {"seq-0": 1, "seq-1": 1, "seq-2": 1, "seq-3": 1}
    harness.drain()


def test_chunks_have_a_limit_of_their_own() -> None:
    harness = Harness(token_budget=20, max_prefill_tokens=6)
    harness.add(9)
    harness.add(9)
    assert counts(harness.step()) == {"seq-0": 6}
    assert counts(harness.step()) == {"seq-0": 3, "seq-1": 3}
    assert counts(harness.step()) == {"seq-0": 1, "seq-1": 6}
    harness.drain()


@pytest.mark.parametrize("chunk", [1, 2, 5, 16])
@pytest.mark.parametrize("num_prompt", [1, 4, 5, 15, 16, 17, 33])
def test_only_the_last_chunk_of_a_prompt_samples(num_prompt: int, chunk: int) -> None:
    harness = Harness(token_budget=16, max_prefill_tokens=chunk, max_num_seqs=1)
    harness.add(num_prompt, max_tokens=3)
    num_chunks = -(-num_prompt // chunk)
    for number in range(num_chunks):
        [entry] = harness.step().entries
        assert (entry.start, entry.is_decode) == (number * chunk, False)
        assert entry.samples == (number == num_chunks - 1)
    [entry] = harness.step().entries
    assert (entry.start, entry.count, entry.samples, entry.is_decode) == (num_prompt, 1, True, True)
    harness.drain()


def test_without_chunked_prefill_a_prompt_waits_for_a_step_that_takes_all_of_it() -> None:
    harness = Harness(enable_chunked_prefill=False)
    harness.add(40)
    harness.add(30)
    harness.add(2)
    assert counts(harness.step()) == {"seq-0": 40}
    assert counts(harness.step()) == {"seq-0": 1, "seq-1": 30, "seq-2": 2}
    harness.drain()


def test_a_prompt_whose_rest_is_short_after_a_prefix_hit_runs_without_chunked_prefill() -> None:
    harness = Harness(enable_chunked_prefill=False, page_size=4)
    harness.add(list(range(42)), max_tokens=1)
    harness.drain()
    harness.add(60, max_tokens=1)
    harness.add(list(range(42)), max_tokens=1, seed=1)
    assert counts(harness.step()) == {"seq-1": 60, "seq-2": 2}
    harness.drain()


# Order and admission


def test_the_lowest_free_slot_is_taken() -> None:
    harness = Harness(max_num_seqs=3)
    requests = [harness.add(2, max_tokens=9) for _ in range(3)]
    harness.step()
    assert [request.seq.slot for request in requests] == [0, 1, 2]
    harness.scheduler.abort(requests[1].seq)
    harness.scheduler.abort(requests[0].seq)
    later = harness.add(2)
    plan = harness.step()
    assert later.seq.slot == 0
    assert plan.admitted == (later.seq,)
    harness.drain()


def test_first_come_first_served_ignores_priority() -> None:
    harness = Harness(max_num_seqs=1)
    requests = [harness.add(2, 1, priority=priority) for priority in (1, 0, -1)]
    plans = [harness.step() for _ in range(3)]
    assert [plan.entries[0].seq for plan in plans] == [request.seq for request in requests]


def test_the_priority_policy_takes_the_lowest_number_first_and_equals_by_arrival() -> None:
    harness = Harness(max_num_seqs=1, policy="priority")
    for priority in (1, 0, -1, 0, -1):
        harness.add(2, 1, priority=priority)
    order = [harness.step().entries[0].seq.seq_id for _ in range(5)]
    assert order == ["seq-2", "seq-4", "seq-1", "seq-3", "seq-0"]


def test_nobody_overtakes_the_first_that_waits() -> None:
    harness = Harness(num_pages=11, page_size=4, max_model_len=41)
    harness.add(20, max_tokens=4)
    harness.add(24)
    harness.add(2)
    assert counts(harness.step()) == {"seq-0": 20}
    assert counts(harness.step()) == {"seq-0": 1}
    harness.drain()


def test_admission_needs_pages_for_the_whole_prompt_and_allocates_those_of_the_chunk() -> None:
    harness = Harness(
        num_pages=11, page_size=4, max_model_len=41, token_budget=8, max_prefill_tokens=8
    )
    first = harness.add(24)
    second = harness.add(20)
    assert counts(harness.step()) == {"seq-0": 8}
    assert len(first.seq.block_table) == 2
    harness.step()
    assert counts(harness.step()) == {"seq-0": 8}
    assert counts(harness.step()) == {"seq-0": 1}  # three pages are free, five are needed
    assert second.seq.status is Status.WAITING
    harness.drain()
    assert harness.scheduler.stats.num_preemptions == 0


def test_cached_pages_of_the_prefix_are_not_counted_as_free_for_the_rest() -> None:
    harness = Harness(num_pages=7, page_size=4, max_model_len=25)
    prompt = list(range(13))
    harness.add(prompt, max_tokens=1)
    harness.drain()
    harness.add(9, max_tokens=8)
    harness.step()
    # Three pages are free, all of them cached, and the prompt needs those three and one more.
    assert (harness.scheduler.pool.num_free, harness.scheduler.pool.num_cached) == (3, 3)
    harness.add(prompt, seed=1)
    assert counts(harness.step()) == {"seq-1": 1}
    harness.drain()


def test_a_plan_names_the_pages_that_are_new() -> None:
    harness = Harness(page_size=4)
    harness.add(list(range(9)), max_tokens=1)
    harness.drain()
    request = harness.add(list(range(9)), max_tokens=9, seed=1)
    plan = harness.step()
    assert plan.admitted == (request.seq,)
    [entry] = plan.entries
    assert (entry.first_new_page, len(entry.new_pages)) == (2, 1)
    assert request.seq.block_table[2:] == list(entry.new_pages)
    plans = [harness.step() for _ in range(4)]
    assert [len(plan.entries[0].new_pages) for plan in plans] == [0, 0, 0, 1]
    assert plans[3].entries[0].first_new_page == 3
    assert plans[3].entries[0].start == 12
    harness.drain()


# Preemption


def two_at_a_page_border(**limits: Any) -> tuple[Harness, Request, Request]:
    """Two sequences at the end of their last pages, and no page free."""
    harness = Harness(num_pages=5, page_size=4, max_model_len=17, **limits)
    older, younger = harness.add(8, max_tokens=5), harness.add(8, max_tokens=5)
    harness.step()
    assert harness.scheduler.pool.num_free == 0
    return harness, older, younger


def test_when_pages_run_out_the_youngest_yields_and_is_recomputed() -> None:
    harness, older, younger = two_at_a_page_border()
    plan = harness.step()
    assert counts(plan) == {"seq-0": 1}
    assert plan.preempted == (younger.seq,)
    assert younger.seq.status is Status.PREEMPTED
    assert (younger.seq.slot, younger.seq.block_table, younger.seq.num_computed) == (None, [], 0)
    assert (younger.seq.num_preemptions, older.seq.num_preemptions) == (1, 0)
    assert younger.seq.num_output == 1
    harness.drain()
    assert harness.scheduler.stats.num_preemptions == 1


def test_a_resumed_sequence_computes_prompt_and_output_and_counts_no_second_hit() -> None:
    harness, _, younger = two_at_a_page_border(enable_prefix_caching=False)
    plans = [harness.step() for _ in range(5)]
    assert [plan.admitted for plan in plans] == [(), (), (), (), (younger.seq,)]
    [entry] = plans[-1].entries
    assert (entry.start, entry.count, entry.samples, entry.is_decode) == (0, 9, True, False)
    assert younger.seq.num_cached == 0
    harness.drain()


def test_a_resumed_sequence_reuses_what_is_still_cached() -> None:
    harness, older, younger = two_at_a_page_border()
    harness.step()
    harness.scheduler.abort(older.seq)
    plan = harness.step()
    assert plan.admitted == (younger.seq,)
    assert plan.entries[0].start == 4  # of its two pages the later one went to the older
    assert younger.seq.num_cached == 0
    assert harness.scheduler.stats.prefix_hit_tokens == 0
    harness.drain()


def test_the_one_that_asks_yields_if_it_is_the_youngest() -> None:
    harness = Harness(num_pages=5, page_size=4, max_model_len=17)
    older, younger = harness.add(6, max_tokens=6), harness.add(8, max_tokens=6)
    harness.step()
    plan = harness.step()
    assert counts(plan) == {"seq-0": 1}
    assert plan.preempted == (younger.seq,)
    assert older.seq.num_preemptions == 0
    harness.drain()


def test_by_priority_the_least_senior_yields_though_it_came_first() -> None:
    harness = Harness(num_pages=5, page_size=4, max_model_len=17, policy="priority")
    low = harness.add(7, max_tokens=5, priority=1)
    harness.step()
    high = harness.add(8, max_tokens=5, priority=0)
    assert counts(harness.step()) == {"seq-0": 1, "seq-1": 8}
    plan = harness.step()
    assert plan.preempted == (low.seq,)
    assert counts(plan) == {"seq-1": 1}
    harness.drain()
    assert high.seq.num_preemptions == 0


def test_nobody_joins_in_a_step_that_preempted() -> None:
    harness, _, younger = two_at_a_page_border(policy="priority")
    senior = harness.add(1, max_tokens=1, priority=-1)
    plan = harness.step()
    assert plan.preempted == (younger.seq,)
    assert counts(plan) == {"seq-0": 1}
    assert harness.scheduler.pool.num_free == 1
    assert harness.step().admitted == (senior.seq,)
    harness.drain()


def test_a_preempted_sequence_resumes_before_those_that_came_later() -> None:
    harness, older, younger = two_at_a_page_border()
    later = harness.add(1, max_tokens=1)
    harness.step()
    harness.scheduler.abort(older.seq)
    assert harness.step().admitted == (younger.seq, later.seq)
    harness.drain()


# The end


def test_a_stop_id_ends_a_sequence_and_is_part_of_it() -> None:
    harness = Harness()
    free = harness.add(3, max_tokens=9)
    harness.drain()
    stop = free.seq.output_ids[2]
    request = harness.add(3, max_tokens=9, seed=0, stop_ids=frozenset({stop}))
    harness.drain()
    first = free.seq.output_ids.index(stop)
    assert request.seq.output_ids == free.seq.output_ids[: first + 1]
    assert (request.seq.finish_reason, request.seq.stop_token) == (FinishReason.STOP, stop)


def finish_of(output: list[int], **options: Any) -> tuple[int, str | None, int | None]:
    """Output length, finish reason and stop token if the device samples `output`."""
    scheduler = Scheduler(make_config(), BlockPool(65, 4))
    seq = Sequence("x", [1, 2, 3], **options)
    scheduler.add(seq)
    for token in output:
        if not scheduler.has_work:
            break
        scheduler.update(scheduler.schedule(), [[token]])
        scheduler.check()
    return seq.num_output, seq.finish_reason, seq.stop_token


def test_stop_ids_do_not_end_it_before_min_tokens() -> None:
    stop = frozenset({7})
    assert finish_of([7, 7, 7], max_tokens=9, stop_ids=stop) == (1, "stop", 7)
    assert finish_of([7, 7, 7], max_tokens=9, stop_ids=stop, min_tokens=1) == (1, "stop", 7)
    assert finish_of([7, 7, 7], max_tokens=9, stop_ids=stop, min_tokens=2) == (2, "stop", 7)
    assert finish_of([7, 5, 5, 7], max_tokens=9, stop_ids=stop, min_tokens=3) == (4, "stop", 7)


def test_stop_wins_over_length_on_the_same_token() -> None:
    assert finish_of([5, 7], max_tokens=2, stop_ids=frozenset({7})) == (2, "stop", 7)
    assert finish_of([5, 5], max_tokens=2, stop_ids=frozenset({7})) == (2, "length", None)


@pytest.mark.parametrize("max_tokens", [1, 2, 33])
def test_exactly_max_tokens_are_sampled(max_tokens: int) -> None:
    assert finish_of([5] * 40, max_tokens=max_tokens) == (max_tokens, "length", None)


@pytest.mark.parametrize("chunk", [3, 64])
def test_with_no_output_tokens_the_prompt_is_computed_and_nothing_sampled(chunk: int) -> None:
    harness = Harness(token_budget=64, max_prefill_tokens=chunk)
    request = harness.add(7, max_tokens=0)
    plans = [harness.step() for _ in range(-(-7 // chunk))]
    assert sum(plan.num_chunk_tokens for plan in plans) == 7
    assert not any(entry.samples for plan in plans for entry in plan.entries)
    assert request.seq.finish_reason is FinishReason.LENGTH
    assert request.seq.output_ids == []


def test_update_tells_which_tokens_it_took_and_which_sequences_ended() -> None:
    scheduler = Scheduler(
        make_config(token_budget=12, max_prefill_tokens=12), BlockPool(65, 4), Continuous()
    )
    seqs = [
        Sequence("long", [1] * 4, 9),
        Sequence("short", [1] * 4, 1),
        Sequence("in chunks", [1] * 9, 9),
    ]
    for seq in seqs:
        scheduler.add(seq)
    update = scheduler.update(scheduler.schedule(), [[11], [12], []])
    assert update.accepted == ((0, 1), (1, 1))
    assert update.finished == (seqs[1],)
    assert [seq.output_ids for seq in seqs] == [[11], [12], []]


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_works_in_every_state_and_only_once(reason: FinishReason) -> None:
    harness, older, younger = two_at_a_page_border()
    waiting = harness.add(1)
    harness.step()
    assert [request.seq.status for request in (older, younger, waiting)] == [
        Status.RUNNING,
        Status.PREEMPTED,
        Status.WAITING,
    ]
    for request in (older, younger, waiting):
        harness.scheduler.finish(request.seq, reason)
        harness.scheduler.check()
        assert (request.seq.status, request.seq.finish_reason) == (Status.FINISHED, reason)
        harness.scheduler.abort(request.seq)
        assert request.seq.finish_reason is reason
    assert not harness.scheduler.has_work
    assert harness.scheduler.schedule().is_empty
    assert harness.scheduler.pool.num_held == 0


def test_a_sequence_without_finite_logits_ends_alone() -> None:
    harness = Harness()
    requests = [harness.add(3, max_tokens=8, breaks_at=b) for b in (None, 5, 1, None)]
    harness.drain()
    assert [request.seq.finish_reason for request in requests] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert [request.seq.num_output for request in requests] == [8, 3, 0, 8]


def test_counts_are_of_the_moment() -> None:
    harness = Harness(max_num_seqs=2)
    for _ in range(3):
        harness.add(2, max_tokens=2)
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (0, 3)
    harness.step()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (2, 1)
    assert harness.scheduler.has_work
    harness.drain()
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (0, 0)


def test_an_idle_scheduler_plans_nothing() -> None:
    scheduler = Scheduler(make_config(), BlockPool(65, 4))
    plan = scheduler.schedule()
    assert plan.is_empty
    assert not plan
    assert scheduler.update(plan, []) == ((), ())


# Admission policies


def test_a_static_batch_ends_before_the_next_starts() -> None:
    harness = Harness(max_num_seqs=2, admission=Static())
    seqs = [harness.add(2, max_tokens=n).seq for n in (1, 3, 1, 1)]
    admitted = [harness.step().admitted for _ in range(4)]
    assert admitted == [(seqs[0], seqs[1]), (), (), (seqs[2], seqs[3])]


def test_a_static_batch_takes_no_latecomers_and_may_take_several_steps_to_fill() -> None:
    harness = Harness(token_budget=8, max_prefill_tokens=8, admission=Static())
    harness.add(6, max_tokens=4)
    harness.add(6, max_tokens=4)
    harness.step()
    late = harness.add(2)
    plan = harness.step()
    assert counts(plan) == {"seq-0": 1, "seq-1": 4}
    plans = [harness.step() for _ in range(4)]
    assert [plan.admitted for plan in plans] == [(), (), (), (late.seq,)]
    harness.drain()


def test_a_dynamic_batch_waits_for_its_window_or_for_full_slots() -> None:
    now = 0.0
    harness = Harness(max_num_seqs=2, admission=Dynamic(1.0, lambda: now))
    harness.step()
    now = 5.0  # a window opens with the first that waits, not before
    first = harness.add(2, max_tokens=1)
    assert harness.step().is_empty
    now = 5.9
    assert harness.step().is_empty
    now = 6.0
    assert harness.step().admitted == (first.seq,)
    full = [harness.add(2, max_tokens=2) for _ in range(2)]
    assert harness.step().admitted == tuple(request.seq for request in full)
    lone = harness.add(2, max_tokens=1)
    harness.step()
    assert harness.step().is_empty
    now = 7.0
    assert harness.step().admitted == (lone.seq,)
    assert not harness.scheduler.has_work


def test_an_abandoned_window_does_not_count_for_the_next_batch() -> None:
    now = 0.0
    harness = Harness(max_num_seqs=2, admission=Dynamic(1.0, lambda: now))
    gone = harness.add(2)
    harness.step()
    harness.scheduler.abort(gone.seq)
    harness.step()
    now = 3.0
    harness.add(2)
    assert harness.step().is_empty

"""Pages hold what their owners wrote, whoever else runs (B02, B04, B05, B43, B44, B49)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.engine.mini import Mini, drain, greedy, logprobs, prompts, run, solo, tokens
from tests.engine.pages import assert_padding_writes_nothing
from tests.oracle import assert_same_greedy

PAGE = 8
ODD_LENGTHS = [5, 12, 19, 27, 33]
"""No multiple of a page or of a prefill bucket."""


@pytest.mark.parametrize("last_page", [False, True])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_padding_writes_nothing(mini: Mini, count: int, last_page: bool) -> None:
    asked = prompts(ODD_LENGTHS[:count], seed=2)
    outputs = assert_padding_writes_nothing(mini, asked, last_page=last_page)
    for prompt, got in zip(asked, outputs, strict=True):
        assert_same_greedy(got, *mini.oracle.greedy(prompt, 24))


@pytest.mark.parametrize("length", [1, PAGE, 2 * PAGE, 2 * PAGE + 1])
def test_prompt_wholly_in_the_prefix_cache(mini: Mini, length: int) -> None:
    """The last prompt token is computed again even if the cache has its page."""
    prompt = prompts([length], seed=11)[0]
    ask = greedy(12, logprobs=0)
    engine = mini.engine()
    first, *others = solo(engine, [(prompt, ask)] * 2)
    others += run(engine, [(prompt, ask), (prompt, ask)])
    shortest = run(engine, [(prompt, greedy(1, logprobs=0))])[0]
    cached = (length - 1) // PAGE * PAGE
    assert first.metrics.num_cached_tokens == 0
    for other in [*others, shortest]:
        assert other.metrics.num_cached_tokens == cached <= length - 1
    assert tokens(others) == tokens([first]) * 3
    assert tokens([shortest])[0] == [tokens([first])[0][0][:1]]
    for other in [*others, shortest]:
        want = logprobs(first)[: len(logprobs(other))]
        assert logprobs(other) == pytest.approx(want, abs=1e-4)
    stats = engine.stats()
    assert stats.prefix_hit_tokens == 4 * cached
    assert stats.prefix_query_tokens == 5 * length
    both = run(mini.engine(), [(prompt, ask), (prompt, ask)])
    assert tokens(both) == tokens([first]) * 2


def test_other_prompts_pages_are_never_served(mini: Mini) -> None:
    """Every single-token difference in two pages, a shift by one, and eviction."""
    base = prompts([2 * PAGE + 1], seed=5)[0]
    variants = [[*base[:i], (base[i] + 1) % 256, *base[i + 1 :]] for i in range(2 * PAGE)]
    shifted = [base[-1], *base[:-1]]
    asked = [base, *variants, shifted]
    ask = greedy(8, logprobs=0)
    plain = solo(mini.engine(enable_prefix_caching=False), [(prompt, ask) for prompt in asked])

    engine = mini.engine()
    run(engine, [(base, ask)])
    warm = [run(engine, [(prompt, ask)])[0] for prompt in asked]
    assert tokens(warm) == tokens(plain)
    cached = [output.metrics.num_cached_tokens for output in warm]
    assert cached == [2 * PAGE, *(i // PAGE * PAGE for i in range(2 * PAGE)), 0]
    for got, want in zip(warm, plain, strict=True):
        assert logprobs(got)[0] == pytest.approx(logprobs(want)[0], abs=1e-4)

    small = mini.engine(pages=10)
    fillers = [(prompt, ask) for prompt in prompts([3 * PAGE] * 3, seed=6)]
    for prompt, want in zip(asked, plain, strict=True):
        for _ in range(2):
            output = run(small, [(prompt, ask)])[0]
            assert tokens([output]) == tokens([want])
        assert output.metrics.num_cached_tokens == 2 * PAGE
        run(small, fillers)
        output = run(small, [(prompt, ask)])[0]
        assert output.metrics.num_cached_tokens == 0, "the pages were not refilled"
        assert tokens([output]) == tokens([want])


def test_what_can_never_fit_blocks_nobody(mini: Mini) -> None:
    """The cache holds 128 tokens: longer prompts are refused, longer outputs end there."""
    engine = mini.engine(pages=17)
    small = [(prompt, greedy(6)) for prompt in prompts([4] * 5, seed=8)]
    want = tokens(solo(mini.engine(), small))
    with pytest.raises(ValueError, match=r"150.*129"):
        engine.submit(prompts([150])[0], greedy(4))
    long_id = engine.submit(prompts([25])[0], greedy(250))
    ids = [engine.submit(*request) for request in small]
    steps = 0
    while not all(engine.output(i).finished for i in ids):
        engine.step()
        steps += 1
    assert steps <= 8  # one prefill, six tokens, one step in flight
    assert tokens([engine.take(i) for i in ids]) == want
    drain(engine)
    output = engine.take(long_id).outputs[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 129 - 25


def test_exhaustion_in_a_decode_step_fails_nobody(mini: Mini) -> None:
    """Eight sequences come to a page border together, and two pages are free."""
    requests = [(prompt, greedy(20)) for prompt in prompts([PAGE - 1] * 8, seed=12)]
    want = tokens(solo(mini.engine(), requests))
    engine = mini.engine(pages=1 + 8 + 2)
    outputs = run(engine, requests)
    assert engine.stats().preemptions > 0
    assert tokens(outputs) == want
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert all(output.error is None for output in outputs)


def test_a_long_prompt_does_not_stall_streams(mini: Mini) -> None:
    """Four streams get a token in every step while a prompt of 34 chunks goes through."""
    chunk = 7
    engine = mini.engine(chunk=chunk, budget=chunk + 4)
    streams = [engine.submit(p, greedy(80)) for p in prompts([4, 5, 6, 7], seed=13)]
    for _ in range(4):
        engine.step()
    prompt = prompts([34 * chunk], seed=14)[0]
    long_id = engine.submit(prompt, greedy(4))
    received: dict[str, list[int]] = {request_id: [] for request_id in [*streams, long_id]}
    progress = []
    for step in range(40):
        for delta in engine.step():
            received[delta.request_id].append(step)
        progress += [s.num_computed for s in engine.scheduler.running if s.num_prompt > 100]
    first = received[long_id][0]
    assert first == 34  # in the step after its last chunk
    assert all(0 < b - a <= chunk for a, b in pairwise(progress[:34]))
    for request_id in streams:
        steps = [step for step in received[request_id] if step <= first]
        assert steps == list(range(first + 1))
    drain(engine)
    got = engine.take(long_id).outputs[0].token_ids
    assert_same_greedy(got, *mini.oracle.greedy(prompt, 4))

"""Quantised KV pages through the whole engine: small, close, and still nobody's business but ours.

A token's cell depends on that token alone, so all that holds for full pages must hold for these.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxserve.sampling_params import SamplingParams
from tests.engine.mini import Mini, greedy, logprobs, prompts, run, solo, tokens
from tests.engine.pages import assert_padding_writes_nothing

LENGTHS = [1, 7, 8, 9, 16, 17, 25, 40]


@pytest.fixture(scope="module", params=["int8", "fp8"])
def eight_bit(request: pytest.FixtureRequest, executables: Path) -> Mini:
    return Mini.build(
        executables, kv_cache_dtype=request.param, batch_buckets=(8,), prefill_buckets=(64,)
    )


def requests() -> list[tuple[list[int], SamplingParams]]:
    chosen = [greedy(24), SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)]
    return [(prompt, chosen[i % 2]) for i, prompt in enumerate(prompts(LENGTHS, seed=30))]


def test_solo_equals_batched(eight_bit: Mini) -> None:
    want = tokens(solo(eight_bit.engine(), requests()))
    assert tokens(run(eight_bit.engine(), requests())) == want
    assert tokens(run(eight_bit.engine(), requests(), every=2)) == want
    assert tokens(run(eight_bit.engine(asynchronous=False), requests()[::-1])) == want[::-1]


def test_preempted_and_resumed(eight_bit: Mini) -> None:
    asked = [(prompt, greedy(64)) for prompt in prompts([8] * 4)]
    small = eight_bit.engine(pages=13)
    assert tokens(run(small, asked)) == tokens(run(eight_bit.engine(), asked))
    assert small.stats().preemptions > 0


def test_shared_prefix(eight_bit: Mini) -> None:
    base = prompts([40], seed=31)[0]
    asked = [(base + tail, greedy(16)) for tail in prompts([1, 3, 9], seed=32)]
    plain = run(eight_bit.engine(enable_prefix_caching=False), asked)
    engine = eight_bit.engine()
    run(engine, [(base, greedy(1))])
    shared = run(engine, asked)
    assert tokens(shared) == tokens(plain)
    assert all(output.metrics.num_cached_tokens >= 32 for output in shared)


def test_padding_writes_no_cell_and_no_scale(eight_bit: Mini) -> None:
    assert_padding_writes_nothing(eight_bit, prompts([5, 12, 19], seed=2))


def test_close_to_full_pages(mini: Mini, eight_bit: Mini) -> None:
    """Keys and values are off by up to a part in 254 of the largest (int8), or of 16 (fp8)."""
    asked = [(prompt, greedy(1, prompt_logprobs=0)) for prompt in prompts([60, 60], seed=33)]
    scored = []
    for one in (mini, eight_bit):
        for output in run(one.engine(), asked):
            assert output.prompt_logprobs is not None
            pairs = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
            scored.append([e[t].logprob for e, t in pairs if e is not None])
    full, quantised = np.array(scored[:2]), np.array(scored[2:])
    bound = {"int8": 0.02, "float8_e4m3fn": 0.1}
    dtype = eight_bit.engine().describe()["kv_cache_dtype"]
    assert np.abs(full - quantised).mean() < bound[dtype]
    assert not np.array_equal(full, quantised)


def test_bytes_of_a_page(mini: Mini, eight_bit: Mini) -> None:
    """One byte an element and four for the scale of every `head_dim` elements."""
    full, quantised = (m.engine().describe()["page_bytes"] for m in (mini, eight_bit))
    head_dim = mini.config.head_dim
    assert quantised * 4 * head_dim == full * (head_dim + 4)


def test_logprobs_do_not_depend_on_the_neighbours(eight_bit: Mini) -> None:
    prompt = prompts([30], seed=34)[0]
    alone = run(eight_bit.engine(), [(prompt, greedy(12, logprobs=0))])[0]
    noise = [(p, greedy(20)) for p in prompts([5, 12, 20], seed=35)]
    among = run(eight_bit.engine(), [*noise, (prompt, greedy(12, logprobs=0))])[-1]
    assert logprobs(among) == pytest.approx(logprobs(alone), abs=1e-4)

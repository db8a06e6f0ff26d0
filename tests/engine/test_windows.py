"""Sliding windows over the paged cache (B07)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.models.llama import bind
from jaxserve.models.scoring import token_log_probs
from tests.engine.asks import only
from tests.engine.mini import CONFIG, Mini, greedy, logprobs, prompts, run, tokens
from tests.oracle import assert_same_greedy

WINDOW = 16
COUNT = 3 * WINDOW


@pytest.fixture(scope="module", params=[(WINDOW, WINDOW), (WINDOW, None)], ids=["all", "one"])
def windowed(request: pytest.FixtureRequest, executables: Path) -> Mini:
    config = replace(CONFIG, sliding_windows=request.param)
    return Mini.build(executables, config, batch_buckets=(8,), prefill_buckets=(64,))


def test_windows_equal_the_oracle(windowed: Mini) -> None:
    """Before, at and past the window, in one chunk and in many, and after preemption."""
    asked = prompts([4, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW], seed=70)
    requests = [(prompt, greedy(COUNT, logprobs=0, prompt_logprobs=0)) for prompt in asked]
    whole = run(windowed.engine(), requests)
    for prompt, output in zip(asked, whole, strict=True):
        assert_same_greedy(only(output), *windowed.oracle.greedy(prompt, COUNT))
        oracle = windowed.oracle.logprobs(prompt + only(output))
        want = [row[token] for row, token in zip(oracle, prompt[1:] + only(output), strict=False)]
        assert output.prompt_logprobs is not None
        scored = [e[t].logprob for e, t in zip(output.prompt_logprobs, prompt, strict=True) if e]
        assert scored + logprobs(output) == pytest.approx(want, abs=1e-4)
    assert tokens(run(windowed.engine(chunk=7, budget=15), requests)) == tokens(whole)
    small = windowed.engine(pages=20)
    assert tokens(run(small, requests)) == tokens(whole)
    assert small.stats().preemptions > 0


def test_scoring_sees_the_same_window(windowed: Mini) -> None:
    prompt = prompts([3 * WINDOW], seed=70)[0]
    score = jax.jit(lambda params: token_log_probs(bind(windowed.config, params), prompt))
    rows = windowed.oracle.logprobs(prompt)
    want = [row[token] for row, token in zip(rows, prompt[1:], strict=False)]
    assert score(windowed.runner.params).tolist() == pytest.approx(want, abs=1e-4)


def test_the_window_matters(windowed: Mini) -> None:
    """The oracle with a full view disagrees, so the test above can fail."""
    prompt = prompts([3 * WINDOW], seed=70)[0]
    full = type(windowed.oracle)(CONFIG, windowed.oracle.params)
    difference = np.abs(full.logits(prompt) - windowed.oracle.logits(prompt)).max(-1)
    assert difference[:WINDOW].max() < 1e-9
    assert difference[WINDOW:].min() > 1e-3

"""Requests that tests of sampling have in common, and what to read from their results."""

from __future__ import annotations

from typing import Any

from jaxserve.engine import Engine
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from tests.engine.mini import Mini, greedy, prompts, run
from tests.oracle import assert_same_greedy

FORCE, BAN = 100.0, -100.0
"""Logit biases."""


def sampled(max_tokens: int = 24, **fields: Any) -> SamplingParams:
    """Parameters of a draw of exactly this many tokens."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def only(output: RequestOutput) -> list[int]:
    """Token ids of a request's single sample."""
    assert len(output.outputs) == 1
    return output.outputs[0].token_ids


def assert_answers(mini: Mini, engine: Engine) -> None:
    """A fixed request, sent after bad ones, still gets its right answer."""
    prompt = prompts([9], seed=99)[0]
    output = run(engine, [(prompt, greedy(8))])[0]
    assert_same_greedy(only(output), *mini.oracle.greedy(prompt, 8))

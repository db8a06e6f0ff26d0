"""The demo model in float32 against known numbers and a dense, cache-free oracle (B09, B55)."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from tests.oracle import Oracle
from tests.smollm2.para import MEAN_NLL, PARA


def test_likelihood_of_a_known_text(f32: LLM) -> None:
    score = f32.score([PARA])[0]
    assert len(score.token_ids) == 96
    assert score.token_logprobs[0] is None
    assert score.mean_nll == pytest.approx(MEAN_NLL, abs=0.02)


def test_greedy_equals_a_dense_forward_without_cache(f32: LLM) -> None:
    """64 tokens each: every token is the dense forward's most likely one, given those before it."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = f32.chat([{"role": "user", "content": "Name three colours."}], params)
    outputs += f32.generate([PARA[:120]], params)
    oracle = Oracle(f32.model_config, f32.params)
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(answer) == 64
        assert len(set(answer)) > 1
        logits = oracle.logits(prompt + answer[:-1])[len(prompt) - 1 :]
        for row, token in zip(logits, answer, strict=True):
            second, first = np.sort(row)[-2:]
            if row.argmax() != token:
                assert first - second < 1e-3
                break


def test_the_answer_is_right(f32: LLM) -> None:
    output = f32.chat(
        [{"role": "user", "content": "What is 2+2?"}],
        SamplingParams(temperature=0, max_tokens=24),
    )[0]
    assert output.outputs[0].text.startswith("The answer to this classic math problem is 4")
    assert output.outputs[0].finish_reason == "stop"

"""What 8-bit weights cost the demo model, against its float32 form, and what they save."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.outputs import RequestOutput
from tests.demo import demo_source
from tests.smollm2.para import MEAN_NLL, PARA
from tests.smollm2.test_tokens_against_float32 import LENGTH, PROMPTS
from tests.smollm2.texts import TEXTS

BEST = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, detokenize=False)
"""The most likely token of every position, given the text before it."""


@pytest.fixture(scope="module")
def int8(executables: str) -> LLM:
    """The demo model in 8 bits, otherwise as users run it."""
    demo_source()
    return LLM(
        quantization="int8",
        max_num_seqs=16,
        max_model_len=1024,
        max_num_batched_tokens=272,
        batch_buckets=(16,),
        prefill_buckets=(256,),
        num_kv_blocks=80,
        warm_up=False,
        compilation_cache_dir=executables,
    )


def best_tokens(outputs: Sequence[RequestOutput], last: int | None = None) -> list[int]:
    """The most likely tokens, of all positions or of each prompt's last ones."""
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        entries = output.prompt_logprobs[1:] if last is None else output.prompt_logprobs[-last:]
        for entry in entries:
            assert entry is not None
            found.append(next(token for token, x in entry.items() if x.rank == 1))
    return found


def agreement(a: list[int], b: list[int]) -> float:
    """Share of equal tokens."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def test_likelihood_of_a_known_text(int8: LLM) -> None:
    assert int8.score([PARA])[0].mean_nll == pytest.approx(MEAN_NLL, abs=0.03)


def test_weights_take_little_more_than_half(int8: LLM) -> None:
    """8 bits and half a bit of scales, of 16."""
    shown = int8.engine.describe()
    assert "int8" in shown["weights"]
    assert shown["weights_bytes"] == pytest.approx(269.1e6 * 8.5 / 16, rel=0.01)


def test_most_likely_tokens_of_texts_are_float32s(f32: LLM, int8: LLM) -> None:
    """Texts that the model did not write have more near ties than its own."""
    want, got = (best_tokens(llm.generate([PARA, *TEXTS], BEST)) for llm in (f32, int8))
    assert len(want) > 450
    assert agreement(want, got) >= 0.97


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_most_likely_tokens_of_its_own_answers_are_float32s(
    f32: LLM, int8: LLM, every: int
) -> None:
    """Each of float32's greedy tokens, given the ones before it."""
    prompts = PROMPTS[::every]
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    answers = [
        [*o.prompt_token_ids, *o.outputs[0].token_ids] for o in f32.generate(prompts, greedy)
    ]
    asked = [{"prompt_token_ids": ids} for ids in answers]
    want, got = (best_tokens(llm.generate(asked, BEST), last=LENGTH) for llm in (f32, int8))
    assert len(want) == LENGTH * len(prompts)
    assert agreement(want, got) >= 0.97

"""The demo model as users run it on a CPU against its float32 form: greedy tokens of 20 prompts."""

from __future__ import annotations

import pytest

from jaxserve import LLM, SamplingParams

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time there was a king who",
    "def fibonacci(n):",
    "The three primary colours are",
    "In 1969, the first people",
    "A recipe for pancakes:",
    "Dear Sir or Madam,",
    "The mitochondria is",
    "Photosynthesis is the process by which",
    "My favourite season is",
    "List the planets of the solar system:",
    "The quick brown fox",
    "To install the package, run",
    "The difference between a virus and a bacterium is",
    "Shakespeare wrote",
    "import numpy as np\n",
    "The Pythagorean theorem states that",
    "Yesterday I went to the market and bought",
    "The best way to learn a language is",
)
LENGTH = 64
TIE = 0.25
"""Nats below float32's best token that bfloat16 may put a token it prefers.

bfloat16 has 8 bits: logits around 20 are known to about a tenth.
"""


@pytest.fixture(scope="module")
def generated(bf16: LLM) -> list[list[int]]:
    """Prompt and 64 greedy tokens of each prompt, all prompts at once."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    outputs = bf16.generate(list(PROMPTS), params)
    assert all(len(output.outputs[0].token_ids) == LENGTH for output in outputs)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def test_every_token_is_float32s_or_a_near_tie(f32: LLM, generated: list[list[int]]) -> None:
    """Each token judged by float32 after the same tokens, not only to a first difference."""
    ask = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, detokenize=False)
    outputs = f32.generate([{"prompt_token_ids": ids} for ids in generated], ask)
    agreed = 0
    for output in outputs:
        assert output.prompt_logprobs is not None
        for position in range(len(output.prompt_token_ids) - LENGTH, len(output.prompt_token_ids)):
            entry = output.prompt_logprobs[position]
            assert entry is not None
            mine = entry[output.prompt_token_ids[position]]
            best = max(x.logprob for x in entry.values())
            assert best - mine.logprob < TIE, f"position {position}: {best - mine.logprob}"
            agreed += mine.rank == 1
    assert agreed >= 0.97 * LENGTH * len(PROMPTS)

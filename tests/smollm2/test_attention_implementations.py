"""The demo model's answer by every implementation of attention that runs on a CPU (B09)."""

from __future__ import annotations

import pytest

from jaxserve import LLM, SamplingParams
from pallas_kernels import implementations
from tests.oracle import Oracle, assert_same_greedy

QUESTION = [{"role": "user", "content": "What is 2+2?"}]
ON_A_CPU = [name for name, one in implementations().items() if "cpu" in one.platforms]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_CPU)
def test_the_answer_equals_full_recomputation(name: str, executables: str) -> None:
    llm = LLM(
        dtype="float32",
        attention_backend=name,
        max_num_seqs=8,
        max_model_len=256,
        max_num_batched_tokens=136,
        batch_buckets=(8,),
        prefill_buckets=(64,),
        num_kv_blocks=20,
        warm_up=False,
        compilation_cache_dir=executables,
    )
    ask = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    output = llm.chat(QUESTION, ask)[0]
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    assert len(set(answer)) > 1
    assert_same_greedy(answer, *Oracle(llm.model_config, llm.params).greedy(prompt, 24))

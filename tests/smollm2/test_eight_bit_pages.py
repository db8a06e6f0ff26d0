"""What quantised KV pages cost the demo model, and what they save (bfloat16 weights)."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from tests.smollm2.para import PARA

ASK = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def mean_nll(llm: LLM) -> float:
    """Of PARA, each token's attention reading the paged cache."""
    output = llm.generate([PARA], ASK)[0]
    assert output.prompt_logprobs is not None
    pairs = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
    return -float(np.mean([e[t].logprob for e, t in pairs if e is not None]))


@pytest.mark.parametrize(
    ("kv_cache_dtype", "loss"),
    [("int8", 0.05), pytest.param("fp8", 0.1, marks=pytest.mark.slow)],
)
def test_likelihood_and_room(bf16: LLM, executables: str, kv_cache_dtype: str, loss: float) -> None:
    """A head's 64 elements take 68 bytes with their scale, and 128 in bfloat16."""
    full = bf16.engine.describe()
    pages = full["num_pages"] * 128 // 68
    llm = LLM(
        kv_cache_dtype=kv_cache_dtype,
        num_kv_blocks=pages,
        max_num_seqs=8,
        max_model_len=1024,
        max_num_batched_tokens=136,
        batch_buckets=(8,),
        prefill_buckets=(128,),
        warm_up=False,
        compilation_cache_dir=executables,
    )
    quantised = llm.engine.describe()
    assert quantised["kv_cache_bytes"] <= full["kv_cache_bytes"]
    assert quantised["kv_tokens"] >= 1.87 * full["kv_tokens"]
    assert quantised["full_length_seqs"] >= 1.87 * full["full_length_seqs"] - 1
    assert mean_nll(llm) == pytest.approx(mean_nll(bf16), abs=loss)

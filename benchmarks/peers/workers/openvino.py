"""OpenVINO GenAI's continuous batching pipeline."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.worker import Loaded, num_cores, serve, versions

CACHE_GB = 1
TOKEN_BUDGET = 4096


def load(options: dict[str, Any]) -> Loaded:
    """Options: `model`, a directory with openvino_model.xml, and `slots`."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GB
    scheduler.max_num_seqs = options["slots"]
    scheduler.max_num_batched_tokens = TOKEN_BUDGET
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": num_cores(), "INFERENCE_PRECISION_HINT": "bf16"}
    pipeline = genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", properties)

    def params(max_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        return config

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [params(n) for n in max_tokens])
        return [list(result.m_generation_ids[0]) for result in results]

    return Loaded(
        generate,
        {
            "versions": versions("openvino", "openvino-genai"),
            "kv_cache_gb": CACHE_GB,
            "token_budget": TOKEN_BUDGET,
            "precision_hint": "bf16",
        },
    )


if __name__ == "__main__":
    serve(load)

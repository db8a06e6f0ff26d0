"""jaxserve through its library, as any script would use it."""

from __future__ import annotations

import logging
from typing import Any

from benchmarks.peers.worker import Loaded, serve, versions

KV_PAGES = 204
"""Of 64 tokens: a pool of 0.3 GB for the demo model, the null page included."""
DESCRIBED = (
    *("dtype", "kv_cache_dtype", "attention", "page_size", "kv_cache_bytes", "weights_bytes"),
    *("token_budget", "shapes"),
)


def load(options: dict[str, Any]) -> Loaded:
    """Options: `model`, `slots`, `max_model_len` and the fields of `EngineConfig` in `fields`."""
    from jaxserve import LLM, SamplingParams

    logging.basicConfig(level=logging.INFO)
    llm = LLM(
        options["model"],
        max_num_seqs=options["slots"],
        max_model_len=options["max_model_len"],
        num_kv_blocks=KV_PAGES,
        enable_prefix_caching=False,
        device="cpu",
        **options["fields"],
    )

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in max_tokens
        ]
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]

    def at_end() -> dict[str, Any]:
        described = llm.engine.describe()
        return {
            **{name: described[name] for name in DESCRIBED if name in described},
            "compilations_after_ready": llm.engine.compilations.count,
        }

    return Loaded(generate, {"versions": versions("jax", "jaxlib", "flax", "numpy")}, at_end)


if __name__ == "__main__":
    serve(load)

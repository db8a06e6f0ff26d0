"""The golden models: two tiny ones on disk, and what transformers says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve.llm import LLM

ROOT = Path(__file__).parents[1] / "golden"
NAMES = ("llama-gqa", "qwen3-llama3rope")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
    "batch_buckets": (8,),
    "prefill_buckets": (32,),
    "block_size": 8,
    "num_kv_blocks": 33,
    "max_logprobs": 5,
}
"""A cache of 256 tokens: the golden cases together need more."""


def load(model: Path | str, executables: Path, **options: Any) -> LLM:
    """An engine for a model of this directory, or for another of the same sizes."""
    directory = ROOT / model
    return LLM(str(directory), compilation_cache_dir=str(executables), **{**OPTIONS, **options})


def cases(name: str) -> list[dict[str, Any]]:
    """Prompts, 32 greedy tokens with the gaps between the two best logits, prompt scores."""
    found = json.loads((ROOT / name / "golden.json").read_text())["cases"]
    assert isinstance(found, list)
    return found

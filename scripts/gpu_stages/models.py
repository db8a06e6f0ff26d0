"""Models of real and of tiny shapes, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxserve import LLM

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **QWEN3_06B,
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
MODELS = {"llama3-8b": LLAMA_8B, "qwen3-0.6b": QWEN3_06B, "tiny": TINY}


def dummy(name: str, scratch: Path, **options: Any) -> LLM:
    """An engine for a model with random weights; executables are kept in `scratch`."""
    path = scratch / f"{name}.json"
    path.write_text(json.dumps(MODELS[name]), encoding="utf-8")
    store = str(scratch / "executables")
    return LLM(str(path), load_format="dummy", compilation_cache_dir=store, **options)

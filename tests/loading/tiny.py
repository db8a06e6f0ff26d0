"""A tiny model to write and load: sizes are distinct, so that a wrong axis shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxserve.loading.canonical import leaves
from jaxserve.models.config import ModelConfig

HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def tiny_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**HF, **changes})


def tiny_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random Hugging Face tensors in float32."""
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(shape, np.float32)
        for leaf in leaves(config)
        for name, shape in leaf.sources
    }


def write_model(
    directory: Path, tensors: dict[str, np.ndarray], shards: int = 1, **changes: Any
) -> Path:
    """Write a Hugging Face directory, in several files with an index if asked."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**HF, **changes}))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def keep(_: tuple[str | int, ...], array: np.ndarray) -> np.ndarray:
    """The `put` of tests."""
    return array


def flat(tree: Any, prefix: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], np.ndarray]:
    """Leaves by path."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {
        path: leaf
        for key, value in tree.items()
        for path, leaf in flat(value, (*prefix, key)).items()
    }


def assert_same_tree(got: Any, want: Any) -> None:
    """Same paths, dtypes and bits."""
    got, want = flat(got), flat(want)
    assert list(got) == list(want)
    for path in want:
        assert got[path].dtype == want[path].dtype, path
        assert got[path].shape == want[path].shape, path
        assert got[path].tobytes() == want[path].tobytes(), path

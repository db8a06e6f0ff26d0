"""GGUF files: converted once into a Hugging Face directory, which is what gets loaded.

Reading a GGUF's metadata and dequantising its tensors takes seconds to minutes, reading the
directory does not.  Does not know where conversions are cached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.files import write_json
from jaxserve.loading.arrays import Array, cast
from jaxserve.loading.canonical import leaves
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_tokenizer import write_tokenizer
from jaxserve.loading.hf import write_config, write_weights
from jaxserve.models.config import ModelConfig

MAGIC = b"GGUF"

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(path: Path, directory: Path, dtype: np.dtype[Any]) -> None:
    """Write the Hugging Face directory of a GGUF file.

    Quantised blocks are expanded in float32 and then rounded to the dtype.  The query and key
    rows of llama models are put back from llama.cpp's order (pairs side by side) into Hugging
    Face's (first halves, then second halves).

    Args:
        path: the GGUF file.
        directory: exists and is empty.
        dtype: of the weights written.

    Raises:
        ValueError: the file is truncated or no GGUF; its architecture, tokenizer or a tensor is
            not supported; tensors are missing or of the wrong shape.
    """
    reader = _open(path)
    metadata = {name: field for name, field in reader.fields.items()}

    def value(key: str) -> Any:
        return metadata[key].contents() if key in metadata else None

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    rope_factors = _read_rope_factors(tensors)
    config = ModelConfig.from_hf(hf_config(value, tensors, rope_factors))
    named = {_hf_name(name, path): tensor for name, tensor in tensors.items()}
    _check_names(set(named), config, path)
    write_tokenizer(value, directory)
    write_config(directory, config, dtype)
    write_weights(directory, _hf_tensors(named, config, dtype, path))
    write_json(directory / "source.json", {"gguf": str(path)})


def _open(path: Path) -> Any:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a complete GGUF file ({error}); fetch it again") from error
    split = reader.fields.get("split.count")
    if split is not None and split.contents() > 1:
        raise ValueError(
            f"{path} is one part of a split GGUF; merge the parts with llama-gguf-split --merge"
        )
    return reader


def _read_rope_factors(tensors: dict[str, Any]) -> Array | None:
    """llama.cpp's form of llama3 scaling: what each pair's frequency is divided by."""
    tensor = tensors.pop("rope_freqs.weight", None)
    return None if tensor is None else np.asarray(tensor.data, np.float64)


def _hf_name(name: str, path: Path) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is not None:
        layer, stem, kind = match.groups()
        if layer is None and stem in _NAMES:
            return f"{_NAMES[stem]}.{kind}"
        if layer is not None and stem in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[stem]}.{kind}"
    raise ValueError(f"{path} has tensor {name!r}, which the supported architectures do not have")


def _check_names(found: set[str], config: ModelConfig, path: Path) -> None:
    expected = {name for leaf in leaves(config) for name, _ in leaf.sources}
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing or unexpected:
        raise ValueError(
            f"{path} does not fit its metadata: missing tensors {missing[:8]}, "
            f"unexpected {unexpected[:8]}"
        )


def _hf_tensors(
    named: dict[str, Any], config: ModelConfig, dtype: np.dtype[Any], path: Path
) -> Iterator[tuple[str, Array]]:
    for leaf in leaves(config):
        for name, shape in leaf.sources:
            array = _dequantize(named[name], name, path)
            if array.shape != shape:
                raise ValueError(f"{path}: {name} has shape {array.shape}, not {shape}")
            if config.architecture in ("llama", "mistral"):
                array = _unpermute(array, name, config)
            yield name, cast(np.ascontiguousarray(array), dtype, name)


def _dequantize(tensor: Any, name: str, path: Path) -> Array:
    import gguf

    try:
        array: Array = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(
            f"{path}: {name} is quantised as {tensor.tensor_type.name}, which cannot be read; "
            "use another quantisation of the model"
        ) from error
    return array


def _unpermute(array: Array, name: str, config: ModelConfig) -> Array:
    """Undo llama.cpp's reordering of the rows of each query or key head."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return array
    paired = array.reshape(heads, config.head_dim // 2, 2, -1)
    return paired.swapaxes(1, 2).reshape(array.shape)

"""GGUF files: metadata translated once into Hugging Face's files, tensors read where they are.

Parsing the metadata with its vocabulary takes seconds; what comes of it, configuration, tokenizer
and an index of the tensors, is kept in a directory.  The weights themselves stay in the GGUF file
and are expanded whenever they are loaded.  Does not know where the directory is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.files import read_json, write_json
from jaxserve.loading.arrays import Array, cast
from jaxserve.loading.canonical import Put, build_tree, fuse, leaves
from jaxserve.loading.gguf_config import hf_config
from jaxserve.loading.gguf_tokenizer import write_tokenizer
from jaxserve.loading.hf import write_config, write_weights
from jaxserve.models.config import ModelConfig

MAGIC = b"GGUF"
TENSORS = "tensors.json"
"""The index: type, shape in bytes and place in the GGUF file of each tensor, by its new name."""

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


def index_gguf(path: Path, directory: Path) -> None:
    """Write everything but the weights: configuration, tokenizer, and where the tensors are.

    Args:
        path: the GGUF file.
        directory: exists and is empty.

    Raises:
        ValueError: the file is truncated or no GGUF; its architecture, tokenizer or a tensor is
            not supported; tensors are missing or of the wrong shape.
    """
    config, tensors = _translate(path, directory)
    write_config(directory, config, None)
    _check_types(tensors, path)
    write_json(directory / TENSORS, {name: _entry(tensor) for name, tensor in tensors.items()})


def convert_gguf(path: Path, directory: Path, dtype: np.dtype[Any]) -> None:
    """Write the Hugging Face directory of a GGUF file, weights included.

    Needs the host memory of one weight file.

    Args:
        path: the GGUF file.
        directory: exists and is empty.
        dtype: of the weights written.

    Raises:
        ValueError: as `index_gguf`.
    """
    config, tensors = _translate(path, directory)
    write_config(directory, config, dtype)
    read = _reader(path, {name: _entry(tensor) for name, tensor in tensors.items()}, config, dtype)
    names = (name for leaf in leaves(config) for name, _ in leaf.sources)
    write_weights(directory, ((name, read(name)) for name in names))


def load_gguf_params(
    path: Path, directory: Path, config: ModelConfig, dtype: np.dtype[Any], put: Put
) -> dict[str, Any]:
    """Load a GGUF file's weights into the canonical tree, leaf by leaf.

    Quantised blocks are expanded in float32 and then rounded to the dtype.  The query and key
    rows of llama models are put back from llama.cpp's order (pairs side by side) into Hugging
    Face's (first halves, then second halves).

    Args:
        path: the GGUF file.
        directory: what `index_gguf` wrote for it.
        config: the model's.
        dtype: of every leaf.
        put: places a leaf.  The array it gets may be kept.

    Raises:
        ValueError: the index or the file is damaged, or a value overflows float16.
    """
    read = _reader(path, read_json(directory / TENSORS), config, dtype)
    return build_tree(config, lambda leaf: put(leaf.path, fuse(leaf, read, dtype)))


def _translate(path: Path, directory: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Write the tokenizer; return the configuration and the tensors by Hugging Face name."""
    reader = _open(path)
    metadata = {name: field for name, field in reader.fields.items()}

    def value(key: str) -> Any:
        return metadata[key].contents() if key in metadata else None

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    rope_factors = _read_rope_factors(tensors)
    config = ModelConfig.from_hf(hf_config(value, tensors, rope_factors))
    named = {_hf_name(name, path): tensor for name, tensor in tensors.items()}
    _check_names(set(named), config, path)
    _check_shapes(named, config, path)
    write_tokenizer(value, directory)
    write_json(directory / "source.json", {"gguf": str(path)})
    return config, named


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


def _check_shapes(named: dict[str, Any], config: ModelConfig, path: Path) -> None:
    for leaf in leaves(config):
        for name, shape in leaf.sources:
            found = tuple(int(size) for size in reversed(named[name].shape))
            if found != shape:
                raise ValueError(f"{path}: {name} has shape {found}, not {shape}")


def _check_types(named: dict[str, Any], path: Path) -> None:
    """Expand one row of each type."""
    one_of_each = {tensor.tensor_type: (name, tensor) for name, tensor in named.items()}
    for kind, (name, tensor) in one_of_each.items():
        _dequantize(tensor.data[:1], kind, f"{path}: {name}")


def _entry(tensor: Any) -> dict[str, Any]:
    return {
        "type": tensor.tensor_type.name,
        "dtype": tensor.data.dtype.str,
        "shape": list(tensor.data.shape),
        "offset": int(tensor.data_offset),
    }


def _reader(
    path: Path, index: dict[str, Any], config: ModelConfig, dtype: np.dtype[Any]
) -> Callable[[str], Array]:
    """Reads a tensor by its Hugging Face name, in Hugging Face's order of rows."""
    import gguf

    try:
        file = np.memmap(path, np.uint8, "r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error

    def read(name: str) -> Array:
        try:
            entry = index[name]
            kind = gguf.GGMLQuantizationType[entry["type"]]
            raw = np.ndarray(entry["shape"], entry["dtype"], file, entry["offset"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the index of {path} does not fit it at {name} ({error}); remove the index"
            ) from error
        array = _dequantize(raw, kind, f"{path}: {name}")
        if config.architecture in ("llama", "mistral"):
            array = _unpermute(array, name, config)
        return cast(np.ascontiguousarray(array), dtype, name)

    return read


def _dequantize(data: Array, kind: Any, what: str) -> Array:
    import gguf

    try:
        array: Array = gguf.dequantize(data, kind)
    except NotImplementedError as error:
        raise ValueError(
            f"{what} is quantised as {kind.name}, which cannot be read; "
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

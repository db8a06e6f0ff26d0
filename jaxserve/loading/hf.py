"""Hugging Face directories: safetensors weights in, safetensors weights out.

Checks every name, shape and type against the model before it reads a byte of weights.  Does not
know other formats.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.files import copy_tokenizer_files, read_json, write_json
from jaxserve.loading.arrays import Array, cast
from jaxserve.loading.canonical import Leaf, Put, build_tree, fuse, hf_tensors, leaves
from jaxserve.models.config import ModelConfig

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 4 << 30
"""Largest weight file written; also the host memory that writing takes."""

_FLOATS = ("F16", "BF16", "F32", "F64")


class TensorFiles:
    """Tensors of one or more safetensors files, by name.  A context manager.

    Raises:
        ValueError: a file is missing, truncated or no safetensors file; the message names it.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._stack = ExitStack()
        self._by_name: dict[str, Any] = {}
        self.file_of: dict[str, Path] = {}
        """Tensor name -> the file that holds it."""
        for file in files:
            if not file.is_file():
                self._stack.close()
                raise ValueError(f"weight file {file} is missing; fetch the model again")
            try:
                handle = self._stack.enter_context(safe_open(file, "numpy"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ValueError(
                    f"weight file {file} is not a complete safetensors file ({error}); "
                    "fetch it again"
                ) from error
            for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                self._by_name[name] = handle
                self.file_of[name] = file

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._by_name[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Type of a tensor as the file spells it, e.g. "BF16"."""
        return str(self._by_name[name].get_slice(name).get_dtype())

    def read(self, name: str, dtype: np.dtype[Any]) -> Array:
        """One tensor, converted to the dtype.

        Raises:
            ValueError: it is not a floating-point tensor of 16 to 64 bits, or overflows float16.
        """
        if self.dtype(name) not in _FLOATS:
            raise ValueError(_wrong_type(name, self.dtype(name)))
        return cast(self._by_name[name].get_tensor(name), dtype, name)


def load_hf_params(
    directory: Path, config: ModelConfig, dtype: np.dtype[Any], put: Put
) -> dict[str, Any]:
    """Load a Hugging Face directory's weights into the canonical tree, leaf by leaf.

    Args:
        directory: has model.safetensors, or shards and their index.
        config: the model's.
        dtype: of every leaf.
        put: places a leaf.  The array it gets may be kept.

    Raises:
        ValueError: files that are missing or truncated; tensors that are missing, unexpected or
            of the wrong shape or type, all of them named in one message.
    """
    with TensorFiles(weight_files(directory)) as tensors:
        _check(tensors, config, directory)

        def make(leaf: Leaf) -> Any:
            array = fuse(leaf, lambda name: tensors.read(name, dtype), dtype)
            return put(leaf.path, array)

        return build_tree(config, make)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory.

    Raises:
        ValueError: none is there, with what is there instead; or the index is not readable.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{directory / INDEX} has no weight_map")
        return [directory / name for name in sorted(set(weight_map.values()))]
    torch_files = sorted(p.name for p in directory.glob("*.bin"))
    if torch_files:
        raise ValueError(
            f"{directory} holds PyTorch weights only ({torch_files[0]}); they are not read "
            "because unpickling runs code: convert them to safetensors"
        )
    raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}")


def _check(tensors: TensorFiles, config: ModelConfig, directory: Path) -> None:
    expected = {name: shape for leaf in leaves(config) for name, shape in leaf.sources}
    found = {name for name in tensors.file_of if not _ignored(name, config)}
    problems = []
    missing = [name for name in expected if name not in found]
    if missing:
        problems.append(f"missing {_some(missing)}{_head_hint(missing)}")
    unexpected = sorted(found - set(expected))
    if unexpected:
        problems.append(f"unexpected {_some(unexpected)}")
    for name in sorted(found & set(expected)):
        if tensors.shape(name) != expected[name]:
            problems.append(f"{name} has shape {tensors.shape(name)}, not {expected[name]}")
        if tensors.dtype(name) not in _FLOATS:
            problems.append(_wrong_type(name, tensors.dtype(name)))
    if problems:
        shown = "; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else "")
        raise ValueError(f"the weights in {directory} do not fit its config.json: {shown}")


def _ignored(name: str, config: ModelConfig) -> bool:
    """Buffers that old versions saved, and the copy of a tied embedding."""
    if name == "lm_head.weight" and config.tie_embeddings:
        logger.info("lm_head.weight is ignored: the configuration ties it to the embedding")
        return True
    return name.endswith("rotary_emb.inv_freq")


def _head_hint(missing: list[str]) -> str:
    if "lm_head.weight" not in missing:
        return ""
    return " (lm_head.weight: set tie_word_embeddings if the model ties it to the embedding)"


def _wrong_type(name: str, dtype: str) -> str:
    return f"{name} has type {dtype}; weights must be {', '.join(_FLOATS)}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def save_hf(
    directory: Path, config: ModelConfig, params: Mapping[Any, Any], tokenizer_from: Path | None
) -> None:
    """Write a Hugging Face directory that transformers reads too.

    Args:
        directory: exists; files in it are overwritten.
        config: the model's.
        params: the canonical tree, all leaves of one dtype.
        tokenizer_from: directory whose tokenizer files are copied.
    """
    dtype = np.asarray(params["norm"]).dtype
    write_config(directory, config, dtype)
    write_weights(directory, hf_tensors(params, config))
    if tokenizer_from is not None:
        copy_tokenizer_files(tokenizer_from, directory)


def write_config(directory: Path, config: ModelConfig, dtype: np.dtype[Any] | None) -> None:
    """Write config.json and generation_config.json."""
    hf = config.to_hf()
    write_json(
        directory / "config.json", hf if dtype is None else {**hf, "torch_dtype": dtype.name}
    )
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": hf["bos_token_id"], "eos_token_id": hf["eos_token_id"]},
    )


def write_weights(
    directory: Path, tensors: Iterable[tuple[str, Array]], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors to one safetensors file, or to shards with an index if they are large."""
    from safetensors.numpy import save_file

    names: list[list[str]] = []
    total = 0
    for i, shard in enumerate(_shards(tensors, max_shard_bytes)):
        save_file(shard, directory / f"part-{i}", metadata={"format": "pt"})
        names.append(list(shard))
        total += sum(array.nbytes for array in shard.values())
    if len(names) == 1:
        (directory / "part-0").rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, shard_names in enumerate(names):
        file = f"model-{i + 1:05d}-of-{len(names):05d}.safetensors"
        (directory / f"part-{i}").rename(directory / file)
        weight_map |= dict.fromkeys(shard_names, file)
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(
    tensors: Iterable[tuple[str, Array]], max_shard_bytes: int
) -> Iterator[dict[str, Array]]:
    shard: dict[str, Array] = {}
    size = 0
    for name, array in tensors:
        if shard and size + array.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = array
        size += array.nbytes
    if shard:
        yield shard

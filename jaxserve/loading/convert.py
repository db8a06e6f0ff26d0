"""Writing a model in another format: any source to a Hugging Face or an Orbax directory.

Knows only which loader and which writer to put together.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.files import cache_directory, new_directory
from jaxserve.loading.arrays import weight_dtype
from jaxserve.loading.gguf import convert_gguf, index_gguf
from jaxserve.loading.hf import save_hf
from jaxserve.loading.orbax import save_orbax
from jaxserve.loading.source import ModelSource, load_config, load_params, locate, resolve

FORMATS = ("hf", "orbax")


def convert(
    src: str | None,
    dst: str,
    format: str = "hf",
    dtype: str = "auto",
    *,
    load_format: str = "auto",
    cache_dir: str | None = None,
) -> None:
    """Write a model, its configuration and its tokenizer into a new directory.

    The directory is complete or absent, whatever happens.  Needs the host memory of all weights,
    except from GGUF to Hugging Face, where it needs that of one shard.

    Args:
        src: GGUF file, Hugging Face or Orbax directory; None is the demo model.
        dst: directory that is not there, or is empty.
        format: "hf" or "orbax".
        dtype: of the weights written; "auto" is bfloat16.
        load_format: how to read the source.
        cache_dir: where the demo model is kept.

    Raises:
        ValueError: the destination is in use, the format is unknown, or the source cannot be
            loaded.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is not one of {', '.join(FORMATS)}")
    target = Path(dst).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{str(target)!r} is there already; give a new directory")
    path, form, _ = locate(src, load_format, cache_directory(cache_dir))
    weights = weight_dtype(dtype)
    try:
        with new_directory(target) as partial:
            if form != "gguf":
                _rewrite(
                    resolve(EngineConfig(model=src, load_format=form)), partial, format, weights
                )
            elif format == "hf":
                convert_gguf(path, partial, weights)
            else:
                _gguf_to_orbax(path, partial, weights)
    except FileExistsError as error:
        raise ValueError(f"{str(target)!r} was made by another process meanwhile") from error


def _rewrite(source: ModelSource, target: Path, format: str, dtype: np.dtype[Any]) -> None:
    config = load_config(source)
    params = load_params(source, config, dtype, lambda _, array: array)
    save = save_hf if format == "hf" else save_orbax
    save(target, config, params, source.files)
    generation = source.files / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, target / generation.name)


def _gguf_to_orbax(path: Path, target: Path, dtype: np.dtype[Any]) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".convert-") as between:
        index_gguf(path, Path(between))
        source = ModelSource(path=path, format="gguf", name=path.stem, files=Path(between))
        _rewrite(source, target, "orbax", dtype)

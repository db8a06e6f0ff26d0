"""Where a model comes from: finding it, telling its format, and loading its parts.

The one place that knows every format; each format's own file knows the details.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig
from jaxserve.files import (
    cache_directory,
    file_key,
    new_directory,
    read_json,
    read_json_if_there,
)
from jaxserve.loading.canonical import Put
from jaxserve.loading.hf import INDEX, SINGLE, load_hf_params, weight_files
from jaxserve.loading.orbax import find_checkpoint, load_orbax_params
from jaxserve.models.config import ModelConfig
from jaxserve.progress import Progress
from jaxserve.tokenizer import Tokenizer

CONVERSION_VERSION = 2
"""Raised when what is read from a model's files changes, so that old results are not reused."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that was found; nothing is loaded yet."""

    path: Path
    """What the user named, or the demo model's file."""
    format: str
    """gguf | hf | orbax | dummy."""
    name: str
    """Short name, e.g. for a server to show."""
    files: Path
    """The directory that is read; for a GGUF file what was translated from it, all but weights."""
    seed: int = 0
    """Of dummy weights."""


def resolve(config: EngineConfig) -> ModelSource:
    """Find the model and its format; fetch the demo model and index a GGUF file if needed.

    Configuration and tokenizer of a GGUF file are translated into a directory in the cache, once
    per file and version of the translation.

    Raises:
        ValueError: there is no such path, its format is not recognised or is not the one asked
            for, or it cannot be fetched or translated.
    """
    cache = cache_directory(config.cache_dir)
    path, form, name = locate(config.model, config.load_format, cache)
    if form == "gguf":
        path, files = path.resolve(), _translated(path, cache)
    else:
        files = path if path.is_dir() else path.parent
    return ModelSource(path=path, format=form, name=name, files=files, seed=config.seed)


def locate(model: str | None, load_format: str, cache: Path) -> tuple[Path, str, str]:
    """The path, the format and the short name of a model; fetches the demo model if needed.

    Raises:
        ValueError: as `resolve`.
    """
    if model is None:
        return _locate_demo(load_format, cache)
    path = Path(model).expanduser()
    if not path.exists():
        raise ValueError(_not_found(model))
    form = _format(path, load_format)
    if form == "gguf":
        path = path if path.is_file() else _only_gguf(path)
        return path, form, path.stem
    directory = path if path.is_dir() else path.parent
    return path, form, directory.resolve().name


def load_config(source: ModelSource) -> ModelConfig:
    """Read the model's configuration.

    Raises:
        ValueError: it is missing, no JSON, or describes a model that is not supported.
    """
    config = source.path if source.path.suffix == ".json" else source.files / "config.json"
    return ModelConfig.from_hf(
        read_json(config), read_json_if_there(source.files / "generation_config.json")
    )


def load_params(
    source: ModelSource, config: ModelConfig, dtype: np.dtype[Any], put: Put
) -> dict[str, Any]:
    """Load the weights into the canonical tree.

    Args:
        source: from `resolve`.
        config: from `load_config`.
        dtype: of every leaf, norms included.
        put: places one leaf, given its path, and returns what the tree holds.  Called leaf by
            leaf: at most one leaf is in host memory at a time if `put` keeps none.

    Raises:
        ValueError: files or tensors are missing, damaged or do not fit the configuration.
    """
    if source.format == "orbax":
        return load_orbax_params(source.files, config, dtype, put)
    if source.format == "gguf":
        from jaxserve.loading.gguf import load_gguf_params

        return load_gguf_params(source.path, source.files, config, dtype, put)
    if source.format == "dummy":
        from jaxserve.loading.dummy import dummy_params

        return dummy_params(config, dtype, source.seed, put)
    return load_hf_params(source.files, config, dtype, put)


def origin(source: ModelSource) -> list[Path]:
    """The files that a model's weights come from; none for dummy weights.

    Raises:
        ValueError: they are not there.
    """
    if source.format == "gguf":
        return [source.path]
    if source.format == "hf":
        return weight_files(source.files)
    if source.format == "orbax" and (checkpoint := find_checkpoint(source.files)) is not None:
        return [path for path in checkpoint.rglob("*") if path.is_file()]
    return []


def load_tokenizer(
    source: ModelSource, tokenizer: str | None = None, chat_template: str | None = None
) -> Tokenizer:
    """Load the model's tokenizer.

    Args:
        source: from `resolve`.
        tokenizer: directory or tokenizer.json to use instead of the model's own.
        chat_template: file with a Jinja template to use instead.  The string is a path.

    Raises:
        ValueError: a file is missing or damaged.  A dummy model without a tokenizer gets one
            token per byte instead.
    """
    template = None if chat_template is None else _read_template(chat_template)
    if tokenizer is not None:
        return Tokenizer.load(Path(tokenizer).expanduser(), template)
    if source.format == "dummy" and not (source.files / "tokenizer.json").is_file():
        return Tokenizer.of_bytes(template)
    return Tokenizer.load(source.files, template)


def _locate_demo(load_format: str, cache: Path) -> tuple[Path, str, str]:
    from jaxserve.loading import demo

    if load_format not in ("auto", "gguf"):
        raise ValueError(
            f"load_format={load_format!r} needs a model; the demo model is a GGUF file"
        )
    return demo.fetch_demo_model(cache), "gguf", demo.NAME


def _translated(path: Path, cache: Path) -> Path:
    """What is cached of a GGUF file, made now if it is not there."""
    path = path.resolve()
    target = cache / "gguf" / f"{path.stem}-{file_key(path, str(CONVERSION_VERSION))}"
    if not target.is_dir():
        from jaxserve.loading.gguf import index_gguf

        try:
            with Progress(f"reading {path.name} once"), new_directory(target) as partial:
                index_gguf(path, partial)
        except FileExistsError:
            pass  # another process was faster; its result is the same
    return target


def _format(path: Path, asked: str) -> str:
    if asked == "dummy":
        if path.is_dir() or path.suffix == ".json":
            return "dummy"
        raise ValueError(
            f"load_format='dummy' needs a config.json or a directory with one, not {str(path)!r}"
        )
    found = _detect(path)
    if asked not in ("auto", found):
        raise ValueError(
            f"load_format={asked!r} does not fit {str(path)!r}, which looks like {found!r}"
        )
    return found


def _detect(path: Path) -> str:
    if path.is_file():
        return _detect_file(path)
    if find_checkpoint(path) is not None:
        return "orbax"
    if any((path / name).is_file() for name in (SINGLE, INDEX)) or list(path.glob("*.bin")):
        return "hf"
    if list(path.glob("*.gguf")):
        return "gguf"
    if (path / "config.json").is_file():
        raise ValueError(
            f"{str(path)!r} has a config.json but no weights ({SINGLE} or {INDEX}); fetch them, "
            "or use load_format='dummy' for random ones"
        )
    shown = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
    raise ValueError(
        f"the format of {str(path)!r} is not recognised (it holds {shown}); expected a Hugging "
        "Face directory, an Orbax checkpoint or a GGUF file"
    )


def _detect_file(path: Path) -> str:
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return "gguf"
    if path.suffix == ".gguf":
        raise ValueError(f"{str(path)!r} does not begin like a GGUF file; fetch it again")
    if path.suffix == ".safetensors":
        raise ValueError(f"{str(path)!r} is a weight file; give the directory that holds it")
    if path.name.endswith(".json"):
        raise ValueError(
            f"{str(path)!r} has no weights; use load_format='dummy' for random ones, or give the "
            "directory that holds the weights"
        )
    raise ValueError(f"the format of {str(path)!r} is not recognised; it is no GGUF file")


def _only_gguf(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{str(directory)!r} holds several GGUF files ({names}); name one")
    return files[0]


def _not_found(model: str) -> str:
    message = f"model={model!r}: there is no such file or directory"
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        message += (
            f"; models are not fetched by name: run `hf download {model} --local-dir DIR` and "
            "give DIR"
        )
    return message


def _read_template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the chat template {path!r}: {error}") from error

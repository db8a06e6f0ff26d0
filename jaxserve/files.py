"""Small file jobs that every loader shares: JSON, atomic directories, the files of a tokenizer.

Knows nothing about models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What a Hugging Face directory may hold for its tokenizer."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ValueError: the file is missing, is not JSON or is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing in {path.parent}") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it may be truncated") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold one JSON object, not {type(value).__name__}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any] | None:
    """`read_json`, or None where there is no such file."""
    return read_json(path) if path.exists() else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object, indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def cache_directory(cache_dir: str | None) -> Path:
    """Where fetched and converted models are kept: as given, else in the user's cache."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jaxserve"


def file_key(path: Path, version: str) -> str:
    """Sixteen digits that change when a file's place, size, time or the version does."""
    path = path.resolve()
    stat = path.stat()
    identity = f"{version} {path} {stat.st_size} {stat.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Fill a temporary sibling and rename it at the end: the target is complete or absent.

    Raises:
        FileExistsError: the target is there already and is not empty.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    partial.mkdir()
    try:
        yield partial
        try:
            partial.rename(target)
        except OSError as error:
            if target.exists():
                raise FileExistsError(f"{target} is there already and is not empty") from error
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def new_file(target: Path) -> Iterator[BinaryIO]:
    """Write a temporary sibling and rename it at the end: the target is the old or the new one.

    Raises:
        OSError: the directory or the file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copy whatever tokenizer files the source directory has."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)

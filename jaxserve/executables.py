"""Compiled executables, kept on disk and found again by what they were made from.

Loading a serialised executable skips tracing, lowering and compiling.  The key covers the
package's own sources, the library versions, the device and its features and the static sizes, so
an entry is either exactly right or not found.  Entries are pickled by JAX: the directory must be
trusted, like the code itself.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Program:
    """One executable to build or load."""

    name: str
    lower: Callable[[], Lowered]
    """Traces and lowers it; not called if the executable is found on disk."""
    arguments: tuple[Any, ...]
    """Its abstract arguments."""
    results: Any
    """A tree of the structure of its results; leaves do not matter."""


class ExecutableStore:
    """A directory of serialised executables."""

    def __init__(self, directory: Path, context: str, devices: Sequence[jax.Device]) -> None:
        """Use `directory` for programs of `devices`.

        `context` is a text that changes with everything static about the programs.
        """
        self._directory = directory
        self._context = context
        self._devices = devices

    def load_all(self, programs: Sequence[Program]) -> dict[str, Compiled]:
        """Every program by name, loaded or compiled on a few threads (XLA releases the GIL)."""
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            compiled = list(pool.map(self._load_or_build, programs))
        return {program.name: c for program, c in zip(programs, compiled, strict=True)}

    def _load_or_build(self, program: Program) -> Compiled:
        path = self._directory / f"{program.name}-{self._key(program)}.xla"
        loaded = self._load(path, program)
        if loaded is not None:
            return loaded
        compiled = program.lower().compile()
        self._save(path, compiled)
        return compiled

    def _key(self, program: Program) -> str:
        leaves, tree = jax.tree.flatten(program.arguments)
        shapes = [(leaf.shape, str(leaf.dtype), str(leaf.sharding)) for leaf in leaves]
        text = "\n".join((environment(), self._context, program.name, str(shapes), str(tree)))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def _load(self, path: Path, program: Program) -> Compiled | None:
        try:
            payload = pickle.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged entry of any kind is rebuilt
            log.warning("ignoring the unreadable executable %s: %s", path.name, error)
            return None
        arguments = jax.tree.structure((program.arguments, {}))
        results = jax.tree.structure(program.results)
        try:
            return serialize_executable.deserialize_and_load(
                payload, arguments, results, execution_devices=self._devices
            )
        except Exception as error:
            log.warning("rebuilding %s, which does not load: %s", path.name, error)
            return None

    def _save(self, path: Path, compiled: Compiled) -> None:
        try:
            payload, _, _ = serialize_executable.serialize(compiled)
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                pickle.dump(payload, file)
            os.replace(file.name, path)
        except (OSError, ValueError, NotImplementedError) as error:
            log.warning("not keeping executable %s: %s", path.name, error)


@functools.cache
def environment() -> str:
    """Everything outside the program that an executable depends on."""
    device = jax.devices()[0]
    parts = (
        jax.__version__,
        jaxlib.__version__,
        device.platform,
        device.device_kind,
        device.client.platform_version,
        str(jax.device_count()),
        os.environ.get("XLA_FLAGS", ""),
        platform.machine(),
        _cpu_features() if device.platform == "cpu" else "",
        _sources(),
    )
    return "\n".join(parts)


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


_NOT_COMPILED = {"bench", "cli", "loading"}
"""Subpackages whose code never reaches a compiled program."""


def _sources() -> str:
    """Digest of the sources that decide what is compiled."""
    import jaxserve
    import pallas_kernels

    digest = hashlib.sha256()
    for package in (jaxserve, pallas_kernels):
        root = Path(next(iter(package.__path__)))
        for source in sorted(root.rglob("*.py")):
            if not _NOT_COMPILED & set(source.relative_to(root).parts):
                digest.update(source.read_bytes())
    return digest.hexdigest()

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
import platform
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

log = logging.getLogger(__name__)

_DIGEST_BYTES = 32


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
        # XLA releases the GIL while it compiles and links.
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "executables")

    def start(self, programs: Sequence[Program]) -> dict[str, Future[Compiled]]:
        """Every program by name, in the making: earlier ones are ready earlier.

        Returns once everything that the directory lacks is compiled; what it has goes on being
        loaded on a few threads, so that a first step need not wait for the shapes of later ones.
        Nothing compiles after the return, unless an intact file turns out not to load: that is
        logged, and counted like any other compilation.
        """
        found = {program.name: self._read(program) for program in programs}
        futures = {
            program.name: self._pool.submit(self._make, program, found[program.name])
            for program in programs
        }
        wait([futures[name] for name, payload in found.items() if payload is None])
        return futures

    def close(self) -> None:
        """Give up loading what has not been needed."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, program: Program, payload: bytes | None) -> Compiled:
        if payload is not None:
            try:
                return self._deserialise(program, payload)
            except Exception as error:  # whatever JAX may raise on an entry it cannot use
                log.warning("rebuilding %s, which does not load: %s", program.name, error)
        compiled = program.lower().compile()
        self._write(self._path(program), compiled)
        return compiled

    def _deserialise(self, program: Program, payload: bytes) -> Compiled:
        arguments = jax.tree.structure((program.arguments, {}))
        results = jax.tree.structure(program.results)
        compiled: Compiled = serialize_executable.deserialize_and_load(
            payload, arguments, results, execution_devices=self._devices
        )
        return compiled

    def _path(self, program: Program) -> Path:
        leaves, tree = jax.tree.flatten(program.arguments)
        shapes = [(leaf.shape, str(leaf.dtype), str(leaf.sharding)) for leaf in leaves]
        text = "\n".join((environment(), self._context, program.name, str(shapes), str(tree)))
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        return self._directory / f"{program.name}-{key}.xla"

    def _read(self, program: Program) -> bytes | None:
        path = self._path(program)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            log.warning("rebuilding %s: its file %s is damaged", program.name, path.name)
            return None
        return payload

    def _write(self, path: Path, compiled: Compiled) -> None:
        try:
            payload, _, _ = serialize_executable.serialize(compiled)
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(file.name, path)
        except (OSError, ValueError, NotImplementedError) as error:
            log.warning("not keeping executable %s: %s", path.name, error)


@functools.cache
def environment() -> str:
    """Everything outside the program that an executable depends on."""
    device = jax.devices()[0]
    parts = (
        jax.__version__,
        metadata.version("jaxlib"),
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

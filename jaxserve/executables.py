"""Compiled executables, kept on disk and found again by what they were made from.

Loading a serialised executable skips tracing, lowering and compiling.  The key covers the
package's own sources, the library versions, the device and its features and the static sizes, so
an entry is either exactly right or not found.  Entries are pickled by JAX: the directory must be
trusted, like the code itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled, Lowered

from jaxserve.files import new_file
from jaxserve.host_memory import trim
from jaxserve.progress import Progress
from jaxserve.sources import digest_of_sources

log = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_NOT_COMPILED = frozenset({"bench", "cli", "loading"})
"""Subpackages whose code never reaches a compiled program."""


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
        missing = [name for name, payload in found.items() if payload is None]
        with _without_persistent_cache():
            futures = {
                program.name: self._pool.submit(self._make, program, found[program.name])
                for program in programs
            }
            self._wait([futures[name] for name in missing])
        return futures

    def close(self) -> None:
        """Give up loading what has not been needed."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self, compiling: list[Future[Compiled]]) -> None:
        with Progress("compiling", len(compiling), "executables") as progress:
            for future in compiling:
                future.add_done_callback(progress.advance)
            wait(compiling)

    def _make(self, program: Program, payload: bytes | None) -> Compiled:
        if payload is not None:
            try:
                return self._deserialise(program, payload)
            except Exception as error:  # whatever JAX may raise on an entry it cannot use
                log.warning("rebuilding %s, which does not load: %s", program.name, error)
                with contextlib.suppress(OSError):
                    self._path(program).unlink()  # the next start compiles and keeps it
                return program.lower().compile()
        compiled = program.lower().compile()
        self._write(self._path(program), compiled)
        trim()  # what one compilation leaves behind would else add to the peak of the next
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
            with new_file(path) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
        except (OSError, ValueError, NotImplementedError) as error:
            log.warning("not keeping executable %s: %s", path.name, error)


@contextlib.contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """Turn JAX's own cache off for a while, where the user has turned it on.

    What that cache returns can be serialised and loaded again, but fails when it is called.
    """
    settings = jax.config.values
    if not (settings["jax_compilation_cache_dir"] and settings["jax_enable_compilation_cache"]):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # makes JAX look at the setting again
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


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
        digest_of_sources(_NOT_COMPILED),
    )
    return "\n".join(parts)


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

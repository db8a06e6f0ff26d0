"""A real `jaxserve serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "--dtype": "float32",
    "--cpu-kernels": "off",
    "--max-num-seqs": 8,
    "--max-num-batched-tokens": 64,
    "--batch-buckets": 8,
    "--prefill-buckets": 56,
    "--block-size": 8,
    "--num-kv-blocks": 256,
    "--max-model-len": 256,
}
"""Flags of a small engine that compiles fast."""
START_S = 120


class ServerProcess:
    """Starts a server on a free port and waits until it listens; ends it when left.

    Args:
        model: directory of the model.
        flags: further flags, which replace those of `SMALL` that have the same name.
        cache: directory for compiled executables and converted weights; share it between
            processes.
        env: further environment variables.
    """

    def __init__(
        self, model: Path | str, *flags: Any, cache: Path, env: dict[str, str] | None = None
    ) -> None:
        given = [str(flag) for flag in flags]
        options = [
            part for name, value in SMALL.items() if name not in given for part in (name, value)
        ]
        self._arguments = [
            *(sys.executable, "-m", "jaxserve", "serve", str(model), "--port", "0"),
            *("--cache-dir", str(cache)),
            *map(str, options),
            *given,
        ]
        # Fewer of XLA's optimisations: compiling is most of what a test waits for.
        self._env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **(env or {})}
        self._lines: list[str] = []
        self._listening = threading.Event()
        self.url = ""

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start the process; returns when it listens.

        Raises:
            RuntimeError: it ended or was silent instead; with its log.
        """
        self.process = subprocess.Popen(
            self._arguments, cwd=ROOT, env=self._env, stderr=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        until = time.monotonic() + START_S
        while not self._listening.wait(0.05):
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"the server did not start:\n{self.log}")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)
            found = re.search(r"listening on (\S+)", line)
            if found:
                self.url = found[1]
                self._listening.set()

    @property
    def log(self) -> str:
        """What the process has written to stderr."""
        return "".join(self._lines)

    @property
    def base_url(self) -> str:
        """What OpenAI's client wants."""
        return f"{self.url}/v1"

    def client(self, **options: Any) -> httpx.Client:
        """A client whose paths are relative to the server; close it."""
        return httpx.Client(**{"base_url": self.url, "timeout": 60, **options})

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(signum)

    def wait(self, timeout: float = 60) -> int:
        """Wait for the end; the exit code."""
        code = self.process.wait(timeout)
        self._reader.join(timeout)
        return code

    def kill(self) -> None:
        """End the process whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

"""The driver's side of the pipe: one engine in one process group, running only on its turn.

Between turns the whole group is stopped by a signal, so that no idle thread of an engine spins.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers import proc

READY_S = 1800
"""Longest start: the first one of some engines compiles for minutes."""
ANSWER_S = 900


class WorkerError(RuntimeError):
    """A worker failed, ended or did not answer in time; one line says how."""


@dataclass(frozen=True)
class Answer:
    """What one call of an engine gave."""

    seconds: float
    tokens: list[list[int]]


class Worker:
    """An engine that was started.  Its `ready` is to be called next.

    Args:
        command: starts it; `benchmarks.peers.worker.serve` answers inside.
        cwd: where; the checkout.
        log: what the engine prints.
        environment: of the process, whole.
    """

    def __init__(
        self, command: Sequence[str], cwd: Path, log: Path, environment: Mapping[str, str]
    ) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            # A group of its own in the same session: the kernel ends a stopped group whose
            # parent has died.
            self._process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                process_group=0,
            )
        self._buffer = b""

    @property
    def pid(self) -> int:
        """Of the worker, the root of the engine's processes."""
        return self._process.pid

    def ready(self) -> dict[str, Any]:
        """Wait until the engine is loaded; its facts."""
        return self._read(READY_S)

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> Answer:
        """Have it generate, and time it."""
        return Answer(**self._ask({"prompts": prompts, "max_tokens": max_tokens}))

    def facts_at_end(self) -> dict[str, Any]:
        """What the engine says about itself after its work."""
        return self._ask({})

    def pause(self) -> None:
        """Stop all its processes; they keep their memory."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the engine and whatever it started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def idle_cores(self, seconds: float = 1.0) -> float:
        """Cores that the engine keeps busy while nobody asks anything of it."""
        before = proc.tree_cpu_s(self.pid)
        time.sleep(seconds)
        return (proc.tree_cpu_s(self.pid) - before) / seconds

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            if number != signal.SIGKILL:
                raise WorkerError(self._last_words("it has ended")) from None

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._last_words("it has ended")) from None
        return self._read(ANSWER_S)

    def _read(self, seconds: float) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + seconds, seconds))
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _line(self, deadline: float, seconds: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(self._last_words(f"no answer in {seconds:.0f} s"))
                part = os.read(self._process.stdout.fileno(), 1 << 20)
                if not part:
                    raise WorkerError(self._last_words("it has ended"))
                self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self, what: str) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = [line for line in lines if line.strip()]
        return f"{what}: {said[-1].strip()}" if said else what

"""A `jaxserve serve` process for programs that measure one: started, asked how it is, ended.

Knows the command line and the endpoints for operators.  Does not know any load.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[1]
START_S = 600.0
"""Longest start: a first one compiles every executable."""
STOP_S = 60.0


@dataclass(frozen=True)
class Served:
    """A server that is ready."""

    url: str
    pid: int
    log: Path

    def get(self, path: str, timeout_s: float = 30.0) -> bytes:
        """Body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return bytes(answer.read())

    def metrics(self) -> dict[str, float]:
        """The samples of `/metrics`, summed over their labels."""
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").decode()):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def memory_bytes(self) -> int:
        """Memory that belongs to the process alone: anonymous pages, resident or swapped."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE)
        return sum(1024 * int(size) for size in found)

    def num_files(self) -> int:
        """Files that the process has open, connections among them."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@contextmanager
def serve(*flags: str, model: str | None = None, max_files: int | None = None) -> Iterator[Served]:
    """Start a server on a free port of 127.0.0.1 and end it afterwards.

    Args:
        flags: of `jaxserve serve`.
        model: what to serve; the demo model if absent.
        max_files: most files, connections among them, that it may have open; once it is ready.

    Raises:
        RuntimeError: it did not become ready; the message has the end of its log.
    """
    command = [sys.executable, "-m", "jaxserve", "serve", *([model] if model else [])]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "server.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, "--port", "0", *flags],
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        try:
            served = Served(_ready(process, log), process.pid, log)
            if max_files is not None:
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (max_files, max_files))
            yield served
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL, once `/ready` says so."""
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        found = re.search(r"listening on (http://\S+)", log.read_text(errors="replace"))
        if found and _is_ready(found[1]):
            return found[1]
        time.sleep(0.1)
    ended = "did not become ready" if process.poll() is None else f"exited {process.returncode}"
    raise RuntimeError(f"the server {ended}:\n{log.read_text(errors='replace')[-3000:]}")


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False

"""Time from the start of a process to its first token, by what it is spent on.

Every measurement is a fresh process that does what `jaxserve generate` does.  Knows how to start
it and how to sum up its figures; what it runs is `jaxserve.cli.startup_process`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.files import cache_directory

PHASES = (
    "imports",
    "configuration",
    "tokenizer",
    "kernels",
    "weights",
    "executables",
    "warm_up",
    "first_token",
)
"""In their order; "imports" begins with the process."""
COLUMNS = (*PHASES, "total", "processor")
"""Phases, their sum, and the processor time of the process, all of its threads together."""

Start = Callable[[EngineConfig, str], dict[str, float]]


def measure(
    config: EngineConfig, prompt: str, repeats: int, *, cold: bool, start: Start | None = None
) -> dict[str, Any]:
    """Start processes one after another.

    Args:
        config: of the engine.
        prompt: what the first token continues.
        repeats: starts to report that find everything cached.
        cold: begin with empty caches, in a directory that is removed afterwards, and report that
            first start, too; else use the caches of `config` after one start that fills them.
        start: runs one process; `start_process` if absent.

    Returns:
        "first_start", seconds by phase or None; "second_starts", a list of such; "median" of
        these; and "peak_rss_bytes" of the last process.

    Raises:
        ValueError: a process failed, with what it said.
    """
    start = start or start_process
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as empty:
        if cold:
            config = _with_caches_in(empty, config)
        first = start(config, prompt)
        others = [start(config, prompt) for _ in range(repeats)]
    return {
        "first_start": _times(first) if cold else None,
        "second_starts": [_times(run) for run in others],
        "median": {name: statistics.median(run[name] for run in others) for name in COLUMNS},
        "peak_rss_bytes": int(others[-1]["peak_rss_bytes"]),
    }


def start_process(config: EngineConfig, prompt: str) -> dict[str, float]:
    """Run one process until its first token.

    Returns:
        Seconds by name of `COLUMNS`, and "peak_rss_bytes".

    Raises:
        ValueError: it failed, with the last line it wrote.
    """
    command = [sys.executable, "-m", "jaxserve.cli.startup_process"]
    begun = time.monotonic()
    job = json.dumps({"config": dataclasses.asdict(config), "prompt": prompt, "begun": begun})
    done = subprocess.run([*command, job], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise ValueError(f"a start exited with {done.returncode}: {said[-1]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def rows(report: dict[str, Any]) -> Sequence[Sequence[str]]:
    """The report as cells of a table: a row per phase."""
    runs = report["second_starts"]
    result = []
    for name in COLUMNS:
        first = report["first_start"]
        times = [run[name] for run in runs]
        cells = [None if first is None else first[name], report["median"][name]]
        cells += [min(times), max(times)]
        result.append([*("-" if s is None else f"{s:.2f}" for s in cells), name.replace("_", " ")])
    return result


HEADER = ("first start, s", "second, median", "min", "max", "phase")


def _with_caches_in(directory: str, config: EngineConfig) -> EngineConfig:
    """The same model, found where it is now, and nothing else that is cached."""
    from jaxserve.loading.source import locate

    path, form, _ = locate(config.model, config.load_format, cache_directory(config.cache_dir))
    return dataclasses.replace(
        config,
        model=str(path),
        load_format=form,
        cache_dir=directory,
        compilation_cache_dir=None,
    )


def _times(run: dict[str, float]) -> dict[str, float]:
    return {name: run[name] for name in COLUMNS}

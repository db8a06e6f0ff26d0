"""The roofline of attention over pages: how near each implementation comes to the copy bandwidth.

A cell's time is compared with the bytes that it cannot avoid, and those with a copy measured in
the same run, so that the figures of different machines can be set side by side.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import jax
from jax.stages import Compiled

from jaxserve.bench import chained, kernel_baselines
from jaxserve.bench.kernel_case import (
    Case,
    attention_operands,
    attention_program,
    plain_layout,
    queries,
    random_pages,
    write_operands,
    write_program,
)
from jaxserve.bench.roofline import Cell, Heads, floor_bytes, flops, split_bytes
from pallas_kernels import KVLayout, Use, compute_capability, implementations
from pallas_kernels.tuned_table import TunedTable
from pallas_kernels.tuning import Tuned, sizes

_L2_BYTES = 60 << 20
"""Of the largest cache in use (H100, H200); a cell's pages are at least four times this."""
_CHAIN_S = 10e-3
"""What a chain should take at the floor: far longer than the clock's error."""
_COMPILERS = 8
Row = dict[str, Any]
Sink = Callable[[dict[str, Any]], None]


@dataclass
class _Job:
    """One implementation in one cell."""

    name: str
    layout: KVLayout | None = None
    tuned: Tuned | None = None
    count: int = 0
    chain: Future[Compiled] | None = None
    empty: Future[Compiled] | None = None
    refused: str | None = None


@dataclass
class Roofline:
    """A sweep over cells; `run` measures, `bytes_only` does not."""

    heads: Heads
    cells: Sequence[Cell]
    names: Sequence[str] | None = None
    """Implementations; all that the platform serves but the reference if absent."""
    baselines: bool = True
    """cuDNN and torch, too, where they can."""
    table: TunedTable = field(default_factory=TunedTable)
    deadline: float = math.inf
    """`time.monotonic` after which nothing more is measured."""

    def bytes_only(self, reason: str) -> dict[str, Any]:
        """The report without times, and why there are none."""
        device = jax.devices()[0]
        return {**self._head(device), "timed": False, "reason": reason, "cells": self._floors()}

    def run(self, on_progress: Sink = lambda report: None) -> dict[str, Any]:
        """Measure every cell; `on_progress` gets the report so far after each."""
        device = jax.devices()[0]
        gpu = device.platform == "gpu"
        report = {**self._head(device), "timed": True, "reason": None, "cells": self._floors()}
        copy = chained.copy_bandwidth(4 << 30 if gpu else 32 << 20)
        report["copy_bytes_per_s"] = copy
        if any(cell.op == "prefill" for cell in self.cells):
            report["matmul_flop_per_s"] = chained.matmul_rate(8192 if gpu else 256)
        on_progress(report)
        working_set = 4 * _L2_BYTES if gpu else 0
        cases = [Case.make(cell, self.heads, working_set) for cell in self.cells]
        with _Compilers() as compilers:
            jobs = [list(self._jobs(case, device, copy, compilers)) for case in cases]
            # Compilers try kernels out on the device: nothing is timed beside them.
            compilers.finish(self._left_s())
        passes = [[self._ours(case, mine) for case, mine in zip(cases, jobs, strict=True)]]
        if self.baselines and gpu:
            passes.append([self._others(case) for case in cases])
        for one in passes:
            for results, case, row in zip(one, cases, report["cells"], strict=True):
                row["copies"] = case.copies
                row["results"] += [self._measured(r, row, report) for r in results]
                on_progress(report)
        return report

    def _left_s(self) -> float | None:
        left = self.deadline - time.monotonic()
        return None if left == math.inf else max(0.0, left)

    def _head(self, device: jax.Device) -> dict[str, Any]:
        return {
            "device": device.device_kind,
            "platform": device.platform,
            "jax": jax.__version__,
            "heads": asdict(self.heads),
            "copy_bytes_per_s": None,
            "matmul_flop_per_s": None,
        }

    def _floors(self) -> list[Row]:
        return [
            {
                **asdict(cell),
                "tokens": sum(cell.kv_lens()),
                "floor_bytes": floor_bytes(cell, self.heads),
                "flops": flops(cell, self.heads),
                "results": [],
            }
            for cell in self.cells
        ]

    def _jobs(
        self, case: Case, device: jax.Device, copy: float, compilers: _Compilers
    ) -> Iterator[_Job]:
        """Lower what each implementation chains, and start to compile it."""
        plain = plain_layout(case.cell, self.heads, device.platform)
        use = Use(plain, self.heads.group, compute_capability=compute_capability(device))
        for name in self.names or _served(device.platform):
            job = _Job(name)
            try:
                self._start(job, case, use, device, copy, compilers)
            except Exception as error:  # a benchmark goes on with the others
                job.refused = short(error)
            yield job

    def _start(
        self,
        job: _Job,
        case: Case,
        use: Use,
        device: jax.Device,
        copy: float,
        compilers: _Compilers,
    ) -> None:
        known = implementations()
        if job.name not in known:
            raise ValueError(f"no attention implementation {job.name!r}")
        implementation = known[job.name]
        job.refused = implementation.refuses(use)
        if job.refused is not None:
            return
        layout = job.layout = implementation.layout(use.layout)
        floor_s = floor_bytes(case.cell, self.heads) / copy
        most = 64 if implementation.tiled else 8
        job.count = min(most, max(2, math.ceil(_CHAIN_S / floor_s)))
        if case.cell.op == "write":
            program = write_program(case, job.name, layout)
        else:
            job.tuned = self._tuned(case.cell, layout, implementation.tiled, device)
            program = attention_program(case, job.name, layout, job.tuned)
            idle = chained.fed_back(chained.nothing)
            job.empty = compilers.start(idle, program.carry, None, job.count)
        job.chain = compilers.start(program.body, program.carry, program.operands, job.count)

    def _tuned(self, cell: Cell, layout: KVLayout, tiled: bool, device: jax.Device) -> Tuned:
        both = sizes(
            "gpu" if tiled else device.platform,
            device.device_kind,
            layout.head_dim,
            self.heads.group,
            cell.page_size,
            str(layout.cell_dtype),
            cell.context,
            self.table,
        )
        return both.decode if cell.op == "decode" else both.prefill

    def _ours(self, case: Case, jobs: list[_Job]) -> Iterator[Row]:
        """Name, seconds and sizes of each implementation, or why there are none."""
        pages: dict[KVLayout, Any] = {}
        for job in jobs:
            yield self._row(job.name, job.tuned, partial(self._time, case, job, pages))

    def _others(self, case: Case) -> Iterator[Row]:
        """The same of the baselines."""
        for name, measure in kernel_baselines.BASELINES.items():
            yield self._row(name, None, partial(measure, case))

    def _row(self, name: str, tuned: Tuned | None, measure: Callable[[], float | str]) -> Row:
        row: Row = {"implementation": name, "seconds": None, "skipped": None}
        row["sizes"] = None if tuned is None else asdict(tuned)
        if time.monotonic() > self.deadline:
            return {**row, "skipped": "out of time"}
        try:
            found = measure()
        except Exception as error:  # a benchmark goes on with the others
            found = short(error)
        return {**row, ("skipped" if isinstance(found, str) else "seconds"): found}

    def _time(self, case: Case, job: _Job, pages: dict[KVLayout, Any]) -> float | str:
        if job.refused is not None:
            return job.refused
        assert job.layout is not None
        assert job.chain is not None
        if not job.chain.done():
            return "not compiled in time"
        chain = job.chain.result()
        if case.cell.op == "write":
            cache = random_pages(job.layout, case.num_pages)
            return chained.seconds(chain, cache, write_operands(case)) / job.count
        assert job.tuned is not None
        assert job.empty is not None
        if job.layout not in pages:
            pages[job.layout] = random_pages(job.layout, case.num_pages)
        operands = attention_operands(case, job.layout, job.tuned, pages[job.layout])
        busy = chained.seconds(chain, queries(case), operands)
        idle = chained.seconds(job.empty.result(), queries(case), None)
        return (busy - idle) / job.count if busy > idle else "too short to be measured"

    def _measured(self, result: Row, cell: Row, report: dict[str, Any]) -> Row:
        """The result with its rates, as shares of what the device can do."""
        took = result["seconds"]
        rate = None if took is None else cell["floor_bytes"] / took
        result |= {
            "bytes_per_s": rate,
            "copy_share": None if rate is None else rate / report["copy_bytes_per_s"],
            "flop_per_s": None if took is None else cell["flops"] / took,
            "split_bytes": None,
        }
        tuned = result["sizes"]
        if cell["op"] == "decode" and tuned is not None and tuned["chunk_kv"] is not None:
            of = Cell(**{name: cell[name] for name in Cell.__dataclass_fields__})
            result["split_bytes"] = split_bytes(of, self.heads, tuned["chunk_kv"])
        return result


class _Compilers:
    """Compiles in the background; XLA takes seconds per program and leaves Python alone."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1))
        self._started: list[Future[Compiled]] = []

    def __enter__(self) -> _Compilers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, body: chained.Body, carry: Any, operands: Any, count: int) -> Future[Compiled]:
        lowered = chained.lower(body, carry, operands, count)
        future = self._pool.submit(lowered.compile)
        self._started.append(future)
        return future

    def finish(self, timeout_s: float | None) -> None:
        """Wait for all that was started, or until time is over."""
        wait(self._started, timeout_s)


def short(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _served(platform: str) -> list[str]:
    """Implementations that are worth timing on a platform."""
    return [
        name
        for name, implementation in implementations().items()
        if platform in implementation.platforms and name not in ("reference", "pallas_interpret")
    ]

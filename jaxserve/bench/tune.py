"""The tuner: times every size of a grid on the device and keeps the fastest in a table.

A candidate counts only if its results agree with the reference implementation.  Runs by hand,
never while serving.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.stages import Compiled

from jaxserve.bench import chained
from jaxserve.bench.kernel_case import (
    Case,
    attention_operands,
    attention_program,
    plain_layout,
    queries,
    random_pages,
)
from jaxserve.bench.kernels import short
from jaxserve.bench.roofline import Cell, Heads
from pallas_kernels import Implementation, KVLayout, Use, choose, compute_capability, select
from pallas_kernels.tuned_table import Entry, Key, TunedTable
from pallas_kernels.tuning import Tuned, group_bucket, xla_sizes

log = logging.getLogger(__name__)

_TOLERANCE = 2e-2
"""Of the relative error in the Frobenius norm: bfloat16 weights and values, 8 bits of mantissa."""
_COUNT = 16
_COMPILERS = 8


@dataclass(frozen=True)
class Grid:
    """The candidates of both forms: every combination of these."""

    block_kv: tuple[int, ...] = (32, 64, 128)
    num_warps: tuple[int, ...] = (2, 4, 8)
    num_stages: tuple[int, ...] = (2, 3, 4)
    chunk_kv: tuple[int, ...] = (128, 256, 512, 1024)
    """Of decode."""
    query_rows: tuple[int, ...] = (64, 128)
    """Of prefill."""

    def entries(self, op: str) -> Iterator[Entry]:
        """The candidates of "decode" or "prefill"."""
        rows, chunks = (1,), self.chunk_kv
        if op == "prefill":
            rows, chunks = self.query_rows, (None,)  # type: ignore[assignment]
        for sizes in itertools.product(
            rows, self.block_kv, chunks, self.num_warps, self.num_stages
        ):
            if sizes[2] is None or sizes[1] <= sizes[2]:
                yield Entry(*sizes)


@dataclass(frozen=True)
class Load:
    """The call that candidates are timed with, and lengths that it is timed at."""

    cell: Cell
    kv_lens: tuple[npt.NDArray[np.int32], ...]
    """All within the cell's: other data of the same program."""

    @classmethod
    def make(cls, op: str, kv_dtype: str, page_size: int, longest: int, batch: int) -> Load:
        """Decode: a uniform batch, a Zipf one and a sequence alone; prefill: one chunk, late."""
        if op == "prefill":
            chunk = longest // 4
            cell = Cell("prefill", 1, longest, "uniform", kv_dtype, page_size, chunk=chunk)
            return cls(cell, (np.array(cell.kv_lens(), np.int32),))
        cell = Cell("decode", batch, longest, "uniform", kv_dtype, page_size)
        alone = np.zeros(batch, np.int32)
        alone[0] = longest
        uniform, zipf = (
            np.array(replace(cell, mix=mix).kv_lens(), np.int32) for mix in ("uniform", "zipf")
        )
        return cls(cell, (uniform, zipf, alone))


@dataclass
class Tuner:
    """Fills a table for one model's heads on the device present."""

    heads: Heads
    path: Path
    grid: Grid = field(default_factory=Grid)
    implementation: str = "auto"
    longest: int = 8192
    batch: int = 32
    deadline: float = math.inf
    """`time.monotonic` after which no candidate is tried any more."""

    def __post_init__(self) -> None:
        self._device = jax.devices()[0]
        self._table = TunedTable.read(self.path) if self.path.is_file() else TunedTable()

    def run(self, ops: Sequence[str], kv_dtypes: Sequence[str], page_sizes: Sequence[int]) -> int:
        """Tune every combination, writing the table after each; the number of entries written.

        Raises:
            ValueError: the implementation cannot serve a combination, has no sizes to tune, or
                its results are wrong at every size.
        """
        written = 0
        for op, kv_dtype, page_size in itertools.product(ops, kv_dtypes, page_sizes):
            load = Load.make(op, kv_dtype, page_size, self.longest, self.batch)
            implementation, layout = self._implementation(load.cell)
            entry = self._best(load, implementation, layout)
            if entry is None:
                break
            key = Key(
                device_kind=self._device.device_kind,
                op=op,
                head_dim=layout.head_dim,
                group=group_bucket(self.heads.group),
                page_size=page_size,
                cell_dtype=str(layout.cell_dtype),
            )
            self._table = self._table.with_entry(key, entry)
            self._table.write(self.path)
            log.info("%s: %s", key, entry)
            written += 1
        return written

    def _implementation(self, cell: Cell) -> tuple[Implementation, KVLayout]:
        plain = plain_layout(cell, self.heads, self._device.platform)
        use = Use(plain, self.heads.group, compute_capability=compute_capability(self._device))
        implementation, layout = select(self.implementation, use)
        return implementation, layout

    def _best(self, load: Load, implementation: Implementation, layout: KVLayout) -> Entry | None:
        """The fastest candidate; None if time is over before there is one."""
        case = Case(load.cell, self.heads, copies=1)
        pages = random_pages(layout, case.num_pages)
        wanted = [self._reference(case, layout, pages, lens) for lens in load.kv_lens]
        best: tuple[float, Entry] | None = None
        reasons = []
        with ThreadPoolExecutor(min(_COMPILERS, os.cpu_count() or 1)) as pool:
            trials = [
                _Trial(entry, entry.tuned(load.cell.op, self.heads.group), pool)
                for entry in self.grid.entries(load.cell.op)
            ]
            for trial in trials:
                trial.start(case, implementation.name, layout)
            for trial in trials:
                if time.monotonic() > self.deadline:
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
                try:
                    times = trial.seconds(case, layout, pages, load.kv_lens, wanted)
                except Exception as error:  # too large for the device, or wrong: not a candidate
                    reasons.append(short(error))
                    log.info("%s: %s", trial.entry, reasons[-1])
                    continue
                score = math.prod(times) ** (1 / len(times))
                if best is None or score < best[0]:
                    us = round(1e6 * times[0], 2)
                    best = score, replace(trial.entry, microseconds=us)
        if best is None and reasons:
            raise ValueError(f"no candidate for {load.cell} is right: {reasons[0]}")
        return None if best is None else best[1]

    def _reference(
        self, case: Case, layout: KVLayout, pages: Any, kv_lens: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float32]:
        tuned = xla_sizes(self._device.platform, layout.page_size, case.cell.context)
        sizes = tuned.decode if case.cell.op == "decode" else tuned.prefill
        name = choose("reference", Use(layout, self.heads.group)).name
        program = attention_program(case, name, layout, sizes)
        operands = attention_operands(case, layout, sizes, pages, kv_lens)
        return _result(jax.jit(program.once), queries(case), operands)


class _Trial:
    """One candidate: its two programs, compiled in the background, and its times."""

    def __init__(self, entry: Entry, tuned: Tuned, pool: ThreadPoolExecutor) -> None:
        self.entry = entry
        self._tuned, self._pool = tuned, pool
        self._once: Future[Compiled] | None = None
        self._chain: Future[Compiled] | None = None
        self._error: Exception | None = None

    def start(self, case: Case, implementation: str, layout: KVLayout) -> None:
        """Lower both programs and leave their compilation to the pool."""
        try:
            program = attention_program(case, implementation, layout, self._tuned)
            once = jax.jit(program.once).lower(program.carry, program.operands)
            chain = chained.lower(program.body, program.carry, program.operands, _COUNT)
        except Exception as error:  # the grid has sizes that a kernel does not take
            self._error = error
            return
        self._once = self._pool.submit(once.compile)
        self._chain = self._pool.submit(chain.compile)

    def seconds(
        self,
        case: Case,
        layout: KVLayout,
        pages: Any,
        kv_lens: Sequence[npt.NDArray[np.int32]],
        wanted: Sequence[npt.NDArray[np.float32]],
    ) -> list[float]:
        """Seconds per call at each of the lengths.

        Raises:
            ValueError: the results are not those of the reference.
        """
        if self._error is not None:
            raise self._error
        assert self._once is not None
        assert self._chain is not None
        once, chain = self._once.result(), self._chain.result()
        times = []
        for lens, want in zip(kv_lens, wanted, strict=True):
            operands = attention_operands(case, layout, self._tuned, pages, lens)
            error = relative_error(_result(once, queries(case), operands), want)
            if not error < _TOLERANCE:
                raise ValueError(f"relative error {error:.3g}")
            times.append(chained.seconds(chain, queries(case), operands) / _COUNT)
        return times


def relative_error(got: npt.NDArray[np.float32], want: npt.NDArray[np.float32]) -> float:
    """`|got - want| / |want|` in the Frobenius norm; NaN if either has one."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _result(call: Callable[..., Any], q: jax.Array, operands: Any) -> npt.NDArray[np.float32]:
    return np.asarray(call(q, operands), np.float32)

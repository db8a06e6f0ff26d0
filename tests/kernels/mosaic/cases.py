"""Random decode calls for the Mosaic GPU kernels, run by Pallas's GPU interpreter."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import KVLayout, KVPages, make_plan, mosaic, reference
from pallas_kernels.registry import AttentionOptions
from pallas_kernels.tuning import Launch

# The interpreter imports this on its first run.  That adds to JAX's settings, and would have the
# first function traced twice.
importlib.import_module("jax.experimental.pallas.fuser")

NUM_SEQS = 4
LONGEST = 320
CHUNK_KV = 256
"""An item then has up to four blocks of keys: more than are in flight, so that slots are reused."""
BLOCK_KV, NUM_STAGES = 64, 2
EDGES = (1, 15, 16, 17, 63, 64, 65, 128, 255, 256, 257, 319, LONGEST)
GARBAGE_ENTRY = 2**30

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Config:
    """What is static in a call: each is one compilation."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "bfloat16"
    block_q: int = 1
    block_kv: int = BLOCK_KV
    num_stages: int = NUM_STAGES
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    detect_races: bool = False

    def __str__(self) -> str:
        optional = {"window": self.window, "cap": self.soft_cap, "rows": self.block_q}
        extra = "".join(f"-{name}{x}" for name, x in optional.items() if x not in (None, 1))
        heads = f"{self.q_heads}x{self.kv_heads}x{self.head_dim}"
        sinks, races = "-sinks" * self.sinks, "-races" * self.detect_races
        return f"{heads}-page{self.page_size}-{self.dtype}{extra}{sinks}{races}"

    @property
    def layout(self) -> KVLayout:
        dtype = np.dtype(jnp.dtype(self.dtype))
        return KVLayout(dtype, self.kv_heads, self.head_dim, self.page_size, "gpu")

    @property
    def pages_per_seq(self) -> int:
        return -(-LONGEST // self.page_size)

    @property
    def num_pages(self) -> int:
        return 1 + NUM_SEQS * self.pages_per_seq + 3

    @property
    def num_rows(self) -> int:
        return NUM_SEQS * self.block_q

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(
            layout=self.layout,
            sm_scale=self.head_dim**-0.5,
            split=True,
            block_q=self.block_q,
            block_kv=self.block_kv,
            window=self.window,
            soft_cap=self.soft_cap,
            launch=Launch(num_stages=self.num_stages),
        )


@dataclass(frozen=True)
class Case:
    """The data of a call."""

    q: Array  # [rows, q_heads, head_dim]
    cells: Array  # [pages, 2, kv_heads, page_size, head_dim]
    tables: Array  # i32[seqs, pages_per_seq]
    kv_lens: Array  # i32[seqs]
    q_lens: Array  # i32[seqs]
    sinks: Array  # f32[q_heads]

    @property
    def cu_q_lens(self) -> Array:
        return np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)

    def rows(self, seq: int) -> slice:
        """Query rows of a sequence."""
        return slice(int(self.cu_q_lens[seq]), int(self.cu_q_lens[seq + 1]))

    def owned(self, page_size: int) -> Array:  # bool[pages, page_size]
        """Cells that hold a key of a sequence."""
        mask = np.zeros((len(self.cells), page_size), bool)
        for table, length in zip(self.tables, self.kv_lens, strict=True):
            position = np.arange(length)
            mask[table[position // page_size], position % page_size] = True
        return mask

    def poisoned(self, poison: float) -> Case:
        """`poison` in all cells of no sequence and in all query rows of none."""
        q, cells = self.q.copy(), self.cells.copy()
        q[self.cu_q_lens[-1] :] = poison
        moved = cells.transpose(0, 3, 1, 2, 4)  # a view: pages, page_size, ...
        moved[~self.owned(cells.shape[3])] = poison
        return Case(q, cells, self.tables, self.kv_lens, self.q_lens, self.sinks)

    def alone(self, seq: int, place: int) -> Case:
        """The call with this sequence only, in place `place`."""
        q, tables = np.zeros_like(self.q), np.full_like(self.tables, GARBAGE_ENTRY)
        kv_lens, q_lens = np.zeros_like(self.kv_lens), np.zeros_like(self.q_lens)
        q[: self.q_lens[seq]] = self.q[self.rows(seq)]
        tables[place], kv_lens[place] = self.tables[seq], self.kv_lens[seq]
        q_lens[place] = self.q_lens[seq]
        return Case(q, self.cells, tables, kv_lens, q_lens, self.sinks)


def make_case(config: Config, seed: int, kv_lens: list[int] | None = None) -> Case:
    """Standard normal numbers; lengths, if not given, at edges, at random and zero."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(config.layout.dtype)

    if kv_lens is None:
        lengths = [*rng.choice(EDGES, NUM_SEQS - 2), rng.integers(1, LONGEST + 1), 0]
        kv_lens = rng.permutation(lengths).tolist()
    lens = np.array(kv_lens, np.int32)
    # An inactive sequence may have a row.
    q_lens = rng.integers(lens > 0, np.clip(lens, 1, config.block_q) + 1)
    cells = normal(*config.layout.abstract(config.num_pages).cells.shape)
    pages = rng.permutation(np.arange(1, config.num_pages))[: NUM_SEQS * config.pages_per_seq]
    tables = pages.reshape(NUM_SEQS, -1).astype(np.int32)
    past_end = np.arange(config.pages_per_seq) * config.page_size >= lens[:, None]
    tables[past_end] = rng.choice([-1, GARBAGE_ENTRY], past_end.sum())
    sinks = rng.standard_normal(config.q_heads).astype(np.float32)
    q = normal(config.num_rows, config.q_heads, config.head_dim)
    return Case(q, cells, tables, lens, q_lens.astype(np.int32), sinks)


@functools.cache
def compiled(config: Config) -> Callable[..., jax.Array]:
    """The kernels in the interpreter, one compilation for all data of a configuration."""
    interpret = plgpu.InterpretGPUParams(detect_races=config.detect_races)

    @jax.jit
    def run(
        q: jax.Array,
        cells: jax.Array,
        tables: jax.Array,
        kv_lens: jax.Array,
        cu_q_lens: jax.Array,
        sinks: jax.Array,
    ) -> jax.Array:
        plan = make_plan(
            kv_lens,
            cu_q_lens[1:] - cu_q_lens[:-1],
            num_items=NUM_SEQS * -(-LONGEST // CHUNK_KV),
            block_q=config.block_q,
            chunk_kv=CHUNK_KV,
            window=config.window,
        )
        call = (tables, kv_lens, cu_q_lens, plan, sinks if config.sinks else None)
        return mosaic.decode(q, KVPages(cells), *call, config.options, interpret=interpret)

    return run


def attend(config: Config, case: Case) -> Array:  # [rows, q_heads, head_dim]
    """The kernels' answer."""
    call = compiled(config)
    data = (case.q, case.cells, case.tables, case.kv_lens, case.cu_q_lens, case.sinks)
    out = np.asarray(call(*data))
    assert call._cache_size() == 1  # type: ignore[attr-defined]
    return out


def expected(config: Config, case: Case) -> Array:  # [rows, q_heads, head_dim]
    """The oracle's answer in float64."""
    return reference.attention(
        case.q,
        case.cells[:, 0],
        case.cells[:, 1],
        case.tables,
        case.kv_lens,
        case.cu_q_lens,
        sm_scale=config.options.sm_scale,
        window=config.window,
        soft_cap=config.soft_cap,
        sinks=case.sinks if config.sinks else None,
    )


def error(got: Array, want: Array) -> float:
    """Largest absolute difference; NaN if there is one."""
    return float(np.abs(got.astype(np.float64) - want).max())


def same_bits(a: Array, b: Array) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))

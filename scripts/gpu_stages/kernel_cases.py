"""Random sequences in a poisoned cache, for the check of an implementation on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels import KVLayout, KVPages, reference
from pallas_kernels.quantize import FP8, INT8, quantize

NUM_SEQS = 8
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Config:
    """What is static in a call: one compilation for all data."""

    form: str
    """decode, verify (several rows per sequence) or prefill."""
    heads: tuple[int, int, int]
    """Query heads, KV heads and head size."""
    page_size: int = 16
    cells: str = "bfloat16"
    """bfloat16, float32, int8 or fp8; the last two under bfloat16 queries."""
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        extras = [f"window {self.window}"] if self.window is not None else []
        extras += [f"cap {self.soft_cap}"] if self.soft_cap is not None else []
        extras += ["sinks"] if self.sinks else []
        heads = "x".join(map(str, self.heads))
        return ", ".join([f"{self.form} {heads}", f"page {self.page_size}", self.cells, *extras])

    @property
    def rows(self) -> int:
        """Query rows of the call."""
        return {"decode": 1, "verify": 4, "prefill": 12}[self.form] * NUM_SEQS

    @property
    def dtype(self) -> np.dtype:
        """Type of queries, keys and values."""
        dtype: np.dtype = jnp.dtype(self.cells if self.cells == "float32" else "bfloat16")
        return dtype

    @property
    def tolerance(self) -> float:
        """Of the largest difference: bfloat16 has 8 bits, and sums are of order 1."""
        return 2e-5 if self.cells == "float32" else 2e-2

    @property
    def pages_per_seq(self) -> int:
        """Width of the block tables; a few hundred keys, so that several chunks are met."""
        return max(5, 640 // self.page_size)

    @property
    def longest(self) -> int:
        """Keys that a block table has room for."""
        return self.pages_per_seq * self.page_size

    def layout(self, platform: str) -> KVLayout:
        """The plain layout of the cache."""
        quantized = {"int8": INT8, "fp8": FP8}.get(self.cells)
        _, kv_heads, head_dim = self.heads
        return KVLayout(self.dtype, kv_heads, head_dim, self.page_size, platform, quantized)


@dataclass(frozen=True)
class Case:
    """The data of one call, and what the oracle says of it."""

    q: Array
    kv_lens: Array
    cu_q_lens: Array
    tables: Array
    sinks: Array | None
    cells: Array
    """In the cell type, `[pages, 2, kv_heads, page_size, head_dim]`."""
    scales: Array | None
    owned: Array
    """Which cells belong to a sequence, `[pages, page_size]`."""
    want: Array

    @property
    def live(self) -> Array:
        """Which query rows belong to an active sequence."""
        rows = np.zeros(len(self.q), bool)
        for seq, length in enumerate(self.kv_lens):
            rows[self.cu_q_lens[seq] : self.cu_q_lens[seq + 1]] = length > 0
        return rows

    def pages(self, layout: KVLayout, poison: float) -> KVPages:
        """The cache with `poison` in every cell and scale that no sequence owns."""
        outside = ~self.owned[:, None, None, :]
        filler = 77 if layout.quantized == INT8 else poison
        if layout.quantized == FP8 and np.isfinite(poison):
            filler = 400.0  # the largest of the type is 448
        cells = np.where(outside[..., None], np.asarray(filler, self.cells.dtype), self.cells)
        scales = None
        if self.scales is not None:
            scales = jnp.asarray(np.where(outside, np.float32(poison), self.scales))
        return KVPages(layout.as_stored(jnp.asarray(cells)), scales)

    def queries(self, poison: float) -> Array:
        """The queries with `poison` in the rows of no active sequence."""
        q = self.q.copy()
        q[~self.live] = poison
        return q


def make_case(config: Config, seed: int) -> Case:
    """Lengths at the edges of pages first, then none, then random ones."""
    rng = np.random.default_rng(seed)
    q_heads, kv_heads, head_dim = config.heads
    kv_lens, q_lens = _lengths(config, rng, seed)
    layout = config.layout("gpu")
    num_pages = 1 + NUM_SEQS * config.pages_per_seq + 3
    tables, owned = _deal(config, rng, kv_lens, num_pages)
    shape = (num_pages, 2, kv_heads, config.page_size, head_dim)
    numbers = rng.standard_normal(shape, np.float32)
    if layout.quantized is None:
        cells, scales = numbers.astype(config.dtype), None
        exact = cells.astype(np.float64)
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            pair = jax.jit(quantize, static_argnums=1)(numbers, layout.quantized)
        cells, scales = (np.asarray(x) for x in pair)
        exact = cells.astype(np.float64) * scales[..., None]
    q = rng.standard_normal((config.rows, q_heads, head_dim), np.float32).astype(config.dtype)
    sinks = rng.standard_normal(q_heads).astype(np.float32) if config.sinks else None
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    want = reference.attention(
        q,
        exact[:, 0],
        exact[:, 1],
        tables,
        kv_lens,
        cu_q_lens,
        sm_scale=head_dim**-0.5,
        window=config.window,
        soft_cap=config.soft_cap,
        sinks=sinks,
    )
    return Case(q, kv_lens, cu_q_lens, tables, sinks, cells, scales, owned, want)


def _lengths(config: Config, rng: np.random.Generator, seed: int) -> tuple[Array, Array]:
    """Keys and query tokens of each sequence."""
    size, longest = config.page_size, config.longest
    most = config.rows // NUM_SEQS
    q_lens = np.full(NUM_SEQS, 1)
    if config.form == "verify":
        q_lens = rng.integers(0, most + 1, NUM_SEQS)
    elif config.form == "prefill":
        q_lens = rng.multinomial(config.rows - 5, np.ones(NUM_SEQS) / NUM_SEQS)
        q_lens[[2, 5]] = 0
    kv_lens = rng.integers(1, longest + 1, NUM_SEQS)
    if seed == 0:
        kv_lens = np.array([0, 1, size - 1, size, size + 1, 256, 257, longest])
    kv_lens = np.minimum(np.maximum(kv_lens, q_lens), longest)
    if config.form == "decode":
        kv_lens[rng.integers(NUM_SEQS)] = 0
    else:
        kv_lens[q_lens == 0] = 0
    if seed == 1:
        kv_lens[:] = 0  # all slots inactive
        q_lens = q_lens if config.form == "decode" else np.zeros_like(q_lens)
    return kv_lens.astype(np.int32), q_lens


def _deal(
    config: Config, rng: np.random.Generator, kv_lens: Array, num_pages: int
) -> tuple[Array, Array]:
    """Block tables over pages in random order, and which cells are then owned."""
    tables = rng.integers(0, 1 << 20, (NUM_SEQS, config.pages_per_seq)).astype(np.int32)
    owned = np.zeros((num_pages, config.page_size), bool)
    free = iter(rng.permutation(np.arange(1, num_pages)))
    for seq, length in enumerate(kv_lens):
        for i in range(-(-int(length) // config.page_size)):
            page = tables[seq, i] = next(free)
            owned[page, : length - i * config.page_size] = True
    return tables, owned

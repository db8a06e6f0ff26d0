"""Random sequences and paged caches that hold them, for the tests of attention over pages.

A case is logical: queries, keys and values of some sequences.  `pages` lays it out in physical
pages, with poison in every cell that no sequence owns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels import KVLayout, KVPages, items_bound, make_plan, ragged_paged_attention
from pallas_kernels.cpu.layout import CPULayout, cpu_layout

NUM_SEQS = 8
PAGES_PER_SEQ = 5
"""Odd, so that tables do not end with a whole block of keys."""
NUM_PAGES = 1 + NUM_SEQS * PAGES_PER_SEQ + 3
CHUNK_ROWS = 48
BLOCK_Q = 8

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Config:
    """What is static in an attention call: each is one compilation per form and platform."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    window: int | None = None
    soft_cap: float | None = None
    quick: bool = False
    """Compile in a fifth of the time, to slower code."""
    quantized: str | None = None
    sinks: bool = False
    decode_rows: int = 1
    """Most query rows of a sequence in decode."""
    block_kv: int | None = None
    """Keys visited at once; `None` for two pages."""

    def __str__(self) -> str:
        window = "" if self.window is None else f"-window{self.window}"
        cap = "" if self.soft_cap is None else f"-cap{self.soft_cap}"
        cells = "" if self.quantized is None else f"-{self.quantized}"
        sinks = "-sinks" if self.sinks else ""
        heads = f"{self.q_heads}x{self.kv_heads}x{self.head_dim}"
        return f"{heads}-page{self.page_size}-{self.dtype}{cells}{window}{cap}{sinks}"

    @property
    def np_dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype(self.dtype))

    @property
    def tolerance(self) -> float:
        """Rounding of float32, or of weights and outputs in 16 bits."""
        return 1e-5 if self.dtype == "float32" and self.quantized is None else 2e-2

    @property
    def longest(self) -> int:
        """Keys that a block table has room for."""
        return PAGES_PER_SEQ * self.page_size

    @property
    def keys_at_once(self) -> int:
        return self.block_kv or 2 * self.page_size

    @property
    def chunk_kv(self) -> int:
        """Keys of an item in decode: a whole number of blocks, and several items per sequence."""
        return max(self.keys_at_once, 2 * self.page_size)

    def num_rows(self, split: bool) -> int:
        return NUM_SEQS * self.decode_rows if split else CHUNK_ROWS

    def layout(self, platform: str) -> KVLayout:
        cells = None if self.quantized is None else np.dtype(jnp.dtype(self.quantized))
        sizes = (self.kv_heads, self.head_dim, self.page_size)
        return KVLayout(self.np_dtype, *sizes, platform, cells)


@dataclass(frozen=True)
class Form:
    """Which of the implementations runs, and which of its loops."""

    split: bool
    platform: str
    implementation: str = "xla"

    def __str__(self) -> str:
        return f"{self.implementation}-{'decode' if self.split else 'chunk'}-{self.platform}"


DECODE_CPU, DECODE_GPU = Form(True, "cpu"), Form(True, "gpu")
CHUNK_CPU, CHUNK_GPU = Form(False, "cpu"), Form(False, "gpu")
FORMS = [DECODE_CPU, DECODE_GPU, CHUNK_CPU, CHUNK_GPU]
REFERENCE = Form(False, "cpu", "reference")
"""The one loop of the reference, over every row."""
DECODE_KERNEL = Form(True, "cpu", "pallas_interpret")
CHUNK_KERNEL = Form(False, "cpu", "pallas_interpret")
KERNELS = [DECODE_KERNEL, CHUNK_KERNEL]


@dataclass(frozen=True)
class Case:
    """Sequences and the query rows of one call."""

    q: Array  # [rows, q_heads, head_dim]
    k: tuple[Array, ...]  # of each sequence, [its length, kv_heads, head_dim]
    v: tuple[Array, ...]
    q_lens: tuple[int, ...]

    @property
    def kv_lens(self) -> Array:
        return np.array([len(k) for k in self.k], np.int32)

    @property
    def cu_q_lens(self) -> Array:
        return np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)

    @property
    def active_rows(self) -> Array:
        """Which rows belong to an active sequence."""
        active = np.zeros(len(self.q), bool)
        active[: sum(self.q_lens)] = np.repeat(self.kv_lens > 0, self.q_lens)
        return active

    def rows(self, seq: int) -> slice:
        """Query rows of a sequence."""
        return slice(int(self.cu_q_lens[seq]), int(self.cu_q_lens[seq + 1]))

    def alone(self, seq: int, place: int) -> Case:
        """The call with this sequence only, in place `place`; decode keeps a row per place."""
        decode = len(self.q) == NUM_SEQS
        first = place if decode else 0
        count = self.q_lens[seq]
        q = np.zeros_like(self.q)
        q[first : first + count] = self.q[self.rows(seq)]
        k, v = [self.k[seq][:0]] * NUM_SEQS, [self.v[seq][:0]] * NUM_SEQS
        k[place], v[place] = self.k[seq], self.v[seq]
        q_lens = [int(decode)] * NUM_SEQS
        q_lens[place] = count
        return Case(q, tuple(k), tuple(v), tuple(q_lens))

    def in_order(self, order: list[int]) -> Case:
        """The same sequences in other places."""
        q = self.q.copy()
        q[: sum(self.q_lens)] = np.concatenate([self.q[self.rows(s)] for s in order])
        k, v, q_lens = (tuple(x[s] for s in order) for x in (self.k, self.v, self.q_lens))
        return Case(q, k, v, q_lens)

    def padded(self) -> Case:
        """With inactive sequences at the end, up to as many as a call takes."""
        missing = NUM_SEQS - len(self.k)
        none = (self.k[0][:0],) * missing
        rows = int(len(self.q) == NUM_SEQS)
        return Case(self.q, self.k + none, self.v + none, self.q_lens + (rows,) * missing)


def make_case(
    config: Config, kv_lens: list[int], q_lens: list[int], num_rows: int, seed: int = 0
) -> Case:
    """Standard normal queries, keys and values."""
    rng = np.random.default_rng(seed)
    numbers = _normal(config.dtype)

    def normal(*shape: int) -> Array:
        size = int(np.prod(shape))
        first = int(rng.integers(numbers.size - size))
        return numbers[first : first + size].reshape(shape)

    shape = (config.kv_heads, config.head_dim)
    return Case(
        normal(num_rows, config.q_heads, config.head_dim),
        tuple(normal(n, *shape) for n in kv_lens),
        tuple(normal(n, *shape) for n in kv_lens),
        tuple(q_lens),
    ).padded()


@functools.cache
def _normal(dtype: str) -> Array:
    """Numbers of which cases are cut: drawing them anew is what hundreds of cases would cost."""
    numbers = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    return numbers.astype(jnp.dtype(dtype))


def random_case(config: Config, split: bool, rng: np.random.Generator) -> Case:
    """Any lengths, borders of pages and chunks more often, and holes.

    An inactive sequence may have rows, and an active one none.
    """
    ps, chunk, longest = config.page_size, config.chunk_kv, config.longest
    edges = np.array([1, ps - 1, ps, ps + 1, chunk - 1, chunk, chunk + 1, longest])
    if split:
        most = config.decode_rows
        q_lens = (
            np.full(NUM_SEQS, most) if rng.random() < 0.5 else rng.integers(0, most + 1, NUM_SEQS)
        )
    else:
        share = np.where(rng.random(NUM_SEQS) < 0.4, 0, 1 / NUM_SEQS)
        q_lens = rng.multinomial(CHUNK_ROWS, [*share, max(0, 1 - share.sum())])[:NUM_SEQS]
        q_lens = np.minimum(q_lens, longest)
    kv_lens = rng.integers(q_lens, longest + 1)
    at_edge = rng.random(NUM_SEQS) < 0.4
    kv_lens[at_edge] = np.maximum(rng.choice(edges, NUM_SEQS), q_lens)[at_edge]
    kv_lens[rng.random(NUM_SEQS) < rng.choice([0, 0.3, 1], p=[0.4, 0.5, 0.1])] = 0
    seed = int(rng.integers(1 << 30))
    return make_case(config, kv_lens.tolist(), q_lens.tolist(), config.num_rows(split), seed)


def pages(
    config: Config, case: Case, *, seed: int = 0, poison: float = 0.0
) -> tuple[Array, Array]:  # [pages, 2, kv_heads, page_size, head_dim], i32[seqs, pages_per_seq]
    """The case in pages scattered at random; entries of tables past the end point anywhere."""
    rng = np.random.default_rng(seed)
    size = config.page_size
    shape = config.layout("gpu").abstract(NUM_PAGES).cells.shape
    cells = np.full(shape, poison, config.np_dtype)
    free = rng.permutation(np.arange(1, NUM_PAGES)).tolist()
    tables = np.zeros((NUM_SEQS, PAGES_PER_SEQ), np.int32)
    owned = []
    for s, (k, v) in enumerate(zip(case.k, case.v, strict=True)):
        for i in range(-(-len(k) // size)):
            page = free.pop()
            owned.append((s, i))
            tables[s, i] = page
            part = slice(i * size, (i + 1) * size)
            filled = len(k[part])
            cells[page, 0, :, :filled] = k[part].swapaxes(0, 1)
            cells[page, 1, :, :filled] = v[part].swapaxes(0, 1)
    garbage = rng.integers(0, NUM_PAGES, tables.shape, np.int32)
    mine = np.zeros(tables.shape, bool)
    if owned:
        mine[tuple(np.array(owned).T)] = True
    return cells, np.where(mine, tables, garbage)


def quantize(x: Array, dtype: np.dtype) -> tuple[Array, Array]:
    """`pallas_kernels.quantize` in NumPy: cells and scales."""
    largest = np.float32(127 if dtype == np.int8 else 448)
    x = x.astype(np.float32)
    scale = np.maximum(np.abs(x).max(-1) * (1 / largest), np.float32(1e-8))
    scaled = x * (1 / scale)[..., None]
    if dtype == np.int8:
        scaled = np.floor(scaled + np.float32(0.5))
    return np.clip(scaled, -largest, largest).astype(dtype), scale


def held(
    config: Config, platform: str, cells: Array
) -> KVPages:  # of arrays as the device holds them
    """Cells as the layout stores them; NaN becomes NaN scales, and NaN cells if there are such."""
    layout = config.layout(platform)
    if layout.quantized is None:
        return KVPages(cells.view(layout.storage_dtype))
    free = np.isnan(cells)
    narrow, scales = quantize(np.where(free, 0, cells), layout.quantized)
    narrow[free] = 77 if layout.quantized == np.int8 else np.nan
    scales[free[..., 0]] = np.nan
    return KVPages(narrow.view(layout.storage_dtype), scales)


def layout_of(config: Config, form: Form) -> KVLayout:
    """The layout that the form's implementation reads."""
    plain = config.layout(form.platform)
    return cpu_layout(plain) if form.implementation.startswith("cpu_") else plain


def held_for(config: Config, form: Form, cells: Array) -> KVPages:
    """Cells as the form's layout stores them."""
    plain = held(config, form.platform, cells)
    if not isinstance(layout_of(config, form), CPULayout):
        return plain
    stored = np.asarray(plain.cells)
    pages, _, heads, size, dim = stored.shape
    k = stored[:, 0].reshape(pages, heads, size, dim // 2, 2).swapaxes(2, 3)
    v = stored[:, 1].reshape(pages, heads, size // 2, 2, dim).swapaxes(3, 4)
    both = [x.reshape(pages, heads, 1, size * dim) for x in (k, v)]
    return KVPages(np.concatenate(both, axis=2))


def sinks(config: Config) -> Array | None:
    """The sink of each head, some larger than any logit."""
    if not config.sinks:
        return None
    return np.random.default_rng(1).normal(0, 3, config.q_heads).astype(np.float32)


def build(config: Config, form: Form) -> Callable[..., jax.Array]:
    """The operation, to be compiled once for all data of a configuration."""
    layout = layout_of(config, form)
    block_q = config.decode_rows if form.split else BLOCK_Q
    if form.split:
        num_items = NUM_SEQS * -(-config.longest // config.chunk_kv)
    else:
        num_items = items_bound(CHUNK_ROWS, NUM_SEQS, BLOCK_Q)

    def run(
        q: jax.Array,
        pages: KVPages,
        tables: jax.Array,
        kv_lens: jax.Array,
        cu_q_lens: jax.Array,
        sinks: jax.Array | None,
    ) -> jax.Array:
        plan = make_plan(
            kv_lens,
            cu_q_lens[1:] - cu_q_lens[:-1],
            num_items=num_items,
            block_q=block_q,
            chunk_kv=config.chunk_kv if form.split else None,
            window=config.window,
        )
        return ragged_paged_attention(
            q,
            pages,
            tables,
            kv_lens,
            cu_q_lens,
            plan,
            layout=layout,
            sm_scale=config.head_dim**-0.5,
            split=form.split,
            block_q=block_q,
            block_kv=config.keys_at_once,
            window=config.window,
            soft_cap=config.soft_cap,
            sinks=sinks,
            implementation=form.implementation,
        )

    options = quick_options(1) if form.implementation == "pallas_interpret" else None
    return jax.jit(run, compiler_options=quick_options() if config.quick else options)


compiled = functools.cache(build)


@functools.cache
def quick_options(level: int = 0) -> dict[str, Any]:
    """Compiler options that save most of the time; not every version of XLA has both.

    Code of level 1 is not so slow that hundreds of cases take longer than its compilation.
    """
    options = {"xla_backend_optimization_level": level, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        del options["xla_cpu_use_fusion_emitters"]
    return options


def attend(
    config: Config,
    form: Form,
    case: Case,
    *,
    seed: int = 0,
    poison: float = 0.0,
    sink: float | None = None,
) -> Array:  # [rows, q_heads, head_dim]
    """The implementation's answer, in the type of the case; `sink` stands for all sinks."""
    cells, tables = pages(config, case, seed=seed, poison=poison)
    joined = sinks(config)
    if joined is not None and sink is not None:
        joined = np.full_like(joined, sink)
    call = compiled(config, form)
    stored = held_for(config, form, cells)
    lengths = (case.kv_lens, case.cu_q_lens)
    out = np.asarray(call(case.q, stored, _wild(config, case, tables), *lengths, joined))
    assert call._cache_size() == 1  # type: ignore[attr-defined]
    return out


def _wild(config: Config, case: Case, tables: Array) -> Array:
    """Tables whose entries past the end are not even numbers of pages, every second one."""
    used = -(-case.kv_lens // config.page_size)
    column = np.arange(tables.shape[1])
    past = (column >= used[:, None]) & (column % 2 == 0)
    numbers = np.random.default_rng(0).integers(-(2**31), 2**31, tables.shape)
    return np.where(past, numbers, tables).astype(np.int32)


def expected(config: Config, case: Case) -> Array:  # [rows, q_heads, head_dim]
    """The answer in float64 from the case itself, without pages: those are part of the claim."""
    out = np.zeros(case.q.shape, np.float64)
    sink = sinks(config)
    for s in np.flatnonzero(case.kv_lens):
        q = case.q[case.rows(s)].astype(np.float64)
        position = np.arange(len(case.k[s]) - len(q), len(case.k[s]))[:, None]
        key = np.arange(len(case.k[s]))
        keep = (key <= position) & (position >= 0)
        if config.window is not None:
            keep &= key > position - config.window
        k, v = (_by_query_head(config, x[s]) for x in (case.k, case.v))
        logits = np.einsum("qhd,htd->hqt", q, k, optimize=True) * config.head_dim**-0.5
        if config.soft_cap is not None:
            logits = config.soft_cap * np.tanh(logits / config.soft_cap)
        weights = np.where(keep, np.exp(logits), 0)  # of normal numbers: nothing overflows
        total = weights.sum(-1, keepdims=True)
        if sink is not None:
            total += np.exp(sink.astype(np.float64))[:, None, None]
        out[case.rows(s)] = (weights / np.where(total > 0, total, 1) @ v).swapaxes(0, 1)
    return out


def _by_query_head(config: Config, x: Array) -> Array:  # [q_heads, keys, head_dim]
    if config.quantized is not None:
        cells, scales = quantize(x, np.dtype(jnp.dtype(config.quantized)))
        x = cells.astype(np.float64) * scales[..., None]
    return np.repeat(x.astype(np.float64).swapaxes(0, 1), config.q_heads // config.kv_heads, axis=0)


def error(got: Array, want: Array) -> float:
    """Largest absolute difference; NaN if there is one."""
    return float(np.abs(got.astype(np.float64) - want).max())


def same_bits(a: Array, b: Array) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))

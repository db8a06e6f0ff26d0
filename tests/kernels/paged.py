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

from pallas_kernels import KVLayout, items_bound, make_plan, ragged_paged_attention, reference

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

    def __str__(self) -> str:
        window = "" if self.window is None else f"-window{self.window}"
        cap = "" if self.soft_cap is None else f"-cap{self.soft_cap}"
        heads = f"{self.q_heads}x{self.kv_heads}x{self.head_dim}"
        return f"{heads}-page{self.page_size}-{self.dtype}{window}{cap}"

    @property
    def np_dtype(self) -> np.dtype:
        return np.dtype(jnp.dtype(self.dtype))

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == "float32" else 2e-2

    @property
    def longest(self) -> int:
        """Keys that a block table has room for."""
        return PAGES_PER_SEQ * self.page_size

    def layout(self, platform: str) -> KVLayout:
        return KVLayout(self.np_dtype, self.kv_heads, self.head_dim, self.page_size, platform)


@dataclass(frozen=True)
class Form:
    """Which of the implementation's loops runs."""

    split: bool
    platform: str

    def __str__(self) -> str:
        return f"{'decode' if self.split else 'chunk'}-{self.platform}"

    @property
    def num_rows(self) -> int:
        return NUM_SEQS if self.split else CHUNK_ROWS


DECODE_CPU, DECODE_GPU = Form(True, "cpu"), Form(True, "gpu")
CHUNK_CPU, CHUNK_GPU = Form(False, "cpu"), Form(False, "gpu")
FORMS = [DECODE_CPU, DECODE_GPU, CHUNK_CPU, CHUNK_GPU]


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

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32).astype(config.np_dtype)

    shape = (config.kv_heads, config.head_dim)
    return Case(
        normal(num_rows, config.q_heads, config.head_dim),
        tuple(normal(n, *shape) for n in kv_lens),
        tuple(normal(n, *shape) for n in kv_lens),
        tuple(q_lens),
    ).padded()


def pages(
    config: Config, case: Case, *, seed: int = 0, poison: float = 0.0
) -> tuple[Array, Array]:  # [pages, 2, kv_heads, page_size, head_dim], i32[seqs, pages_per_seq]
    """The case in pages scattered at random; entries of tables past the end point anywhere."""
    rng = np.random.default_rng(seed)
    size = config.page_size
    shape = config.layout("gpu").shape(NUM_PAGES)
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


@functools.cache
def compiled(config: Config, form: Form) -> Callable[..., jax.Array]:
    """The operation, one compilation for all data of a configuration."""

    def run(
        q: jax.Array,
        cache: jax.Array,
        tables: jax.Array,
        kv_lens: jax.Array,
        cu_q_lens: jax.Array,
    ) -> jax.Array:
        plan = None
        if not form.split:
            plan = make_plan(
                kv_lens,
                cu_q_lens[1:] - cu_q_lens[:-1],
                num_items=items_bound(CHUNK_ROWS, NUM_SEQS, BLOCK_Q),
                block_q=BLOCK_Q,
                window=config.window,
            )
        return ragged_paged_attention(
            q,
            cache,
            tables,
            kv_lens,
            cu_q_lens,
            plan,
            layout=config.layout(form.platform),
            sm_scale=config.head_dim**-0.5,
            split=form.split,
            block_q=NUM_SEQS if form.split else BLOCK_Q,
            block_kv=2 * config.page_size,
            window=config.window,
            soft_cap=config.soft_cap,
        )

    return jax.jit(run, compiler_options=quick_options() if config.quick else None)


@functools.cache
def quick_options() -> dict[str, Any]:
    """Compiler options that save most of the time; not every version of XLA has both."""
    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        del options["xla_cpu_use_fusion_emitters"]
    return options


def attend(
    config: Config, form: Form, case: Case, *, seed: int = 0, poison: float = 0.0
) -> Array:  # [rows, q_heads, head_dim]
    """The implementation's answer, in the type of the case."""
    cells, tables = pages(config, case, seed=seed, poison=poison)
    stored = cells.view(config.layout(form.platform).storage_dtype)
    call = compiled(config, form)
    out = np.asarray(call(case.q, stored, tables, case.kv_lens, case.cu_q_lens))
    assert call._cache_size() == 1  # type: ignore[attr-defined]
    return out


def expected(config: Config, case: Case) -> Array:  # [rows, q_heads, head_dim]
    """The oracle's answer in float64."""
    cells, tables = pages(config, case)
    return reference.attention(
        case.q,
        cells[:, 0],
        cells[:, 1],
        tables,
        case.kv_lens,
        case.cu_q_lens,
        sm_scale=config.head_dim**-0.5,
        window=config.window,
        soft_cap=config.soft_cap,
    )


def error(got: Array, want: Array) -> float:
    """Largest absolute difference; NaN if there is one."""
    return float(np.abs(got.astype(np.float64) - want).max())


def same_bits(a: Array, b: Array) -> bool:
    return bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))

"""Writing keys and values into pages: the right cells, no other, in place (B02)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import KVLayout, KVPages, kv_write
from tests.kernels.paged import Array, quantize, quick_options

NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM, ROWS = 3, 3, 16, 40, 16
"""Neither the heads, nor their elements, nor half of them are a power of two."""
NUM_CELLS = NUM_PAGES * PAGE_SIZE


@dataclass(frozen=True)
class Way:
    """An implementation and what it writes."""

    implementation: str
    platform: str
    dtype: str
    quantized: str | None = None

    def __str__(self) -> str:
        cells = "" if self.quantized is None else f"-{self.quantized}"
        return f"{self.implementation}-{self.platform}-{self.dtype}{cells}"

    @property
    def layout(self) -> KVLayout:
        dtype = np.dtype(jnp.dtype(self.dtype))
        cells = None if self.quantized is None else np.dtype(jnp.dtype(self.quantized))
        return KVLayout(dtype, KV_HEADS, HEAD_DIM, PAGE_SIZE, self.platform, cells)


PLAIN = [
    Way(implementation, *storage)
    for implementation in ("xla", "pallas_interpret")
    for storage in [("cpu", "float32"), ("cpu", "bfloat16"), ("gpu", "bfloat16")]
]
EIGHT_BIT = [
    Way(implementation, "cpu", *types)
    for implementation in ("xla", "pallas_interpret")
    for types in [
        ("bfloat16", "int8"),
        ("bfloat16", "float8_e4m3fn"),
        ("float32", "int8"),
        ("float32", "float8_e4m3fn"),
    ]
]


def each(ways: list[Way]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("way", ways, ids=str)


def normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_pages(layout: KVLayout) -> KVPages:
    """Pages of cells, not yet as they are stored."""
    cells = normal(0, *layout.abstract(NUM_PAGES).cells.shape).astype(layout.dtype)
    return (
        KVPages(cells) if layout.quantized is None else KVPages(*quantize(cells, layout.quantized))
    )


def rows(layout: KVLayout) -> tuple[Array, Array]:
    shape = (ROWS, layout.num_kv_heads, layout.head_dim)
    k, v = normal(1, *shape).astype(layout.dtype), normal(2, *shape).astype(layout.dtype)
    k[0, 0] = 0  # a key that has no scale
    return k, v


def build(way: Way, **options: Any) -> Callable[..., KVPages]:
    def run(
        pages: KVPages,
        k: jax.Array,
        v: jax.Array,
        slots: jax.Array,
        cos: jax.Array | None = None,
        sin: jax.Array | None = None,
    ) -> KVPages:
        how: Any = {"cos": cos, "sin": sin, "implementation": way.implementation}
        return kv_write(k, v, slots, pages, layout=way.layout, **how)

    return jax.jit(run, donate_argnums=0, compiler_options=options)


@functools.cache
def compiled(way: Way) -> Callable[..., KVPages]:
    return build(way, **quick_options(1) if way.implementation == "pallas_interpret" else {})


def written(way: Way, *arguments: Array) -> KVPages:
    """Cells and scales after the write to `random_pages`."""
    layout, pages = way.layout, random_pages(way.layout)
    stored = pages._replace(cells=pages.cells.view(layout.storage_dtype))
    out = compiled(way)(jax.tree.map(jnp.asarray, stored), *arguments)
    cells = np.asarray(out.cells).view(layout.cell_dtype)
    return KVPages(cells, None if out.scales is None else np.asarray(out.scales))


def expected(way: Way, k: Array, v: Array, slots: Array) -> KVPages:
    """The same, one cell after the other."""
    layout, pages = way.layout, random_pages(way.layout)
    for row, slot in enumerate(slots):
        for part, x in enumerate((k[row], v[row])):
            place = (slot // PAGE_SIZE, part, slice(None), slot % PAGE_SIZE)
            if slot >= 0 and layout.quantized is None:
                pages.cells[place] = x
            elif slot >= 0:
                pages.cells[place], pages.scales[place] = quantize(x, layout.quantized)
    return pages


def same_bits(got: KVPages, want: KVPages) -> bool:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)


def check_cells(way: Way, slots: Array) -> None:
    k, v = rows(way.layout)
    assert same_bits(written(way, k, v, slots), expected(way, k, v, slots))


@each(PLAIN + EIGHT_BIT)
def test_the_right_cells_and_no_other_bit_for_bit(way: Way) -> None:
    @settings(max_examples=50, deadline=None)
    @given(
        cells=st.lists(st.integers(0, NUM_CELLS - 1), min_size=ROWS, max_size=ROWS, unique=True),
        none=st.lists(st.sampled_from([0, 0, -1, -7]), min_size=ROWS, max_size=ROWS),
    )
    def check(cells: list[int], none: list[int]) -> None:
        check_cells(way, np.where(np.array(none) < 0, none, cells).astype(np.int32))

    check()
    assert compiled(way)._cache_size() <= 2  # type: ignore[attr-defined]  # with and without angles


@each(PLAIN + EIGHT_BIT)
def test_rows_without_a_cell_write_nothing_whatever_they_hold(way: Way) -> None:
    """JAX takes index -1 for the last page: a live one in a full pool."""
    k, v = rows(way.layout)
    none = np.full(ROWS, -1, np.int32)
    nan = np.full_like(k, np.nan)
    assert same_bits(written(way, k, v, none), random_pages(way.layout))
    assert same_bits(written(way, nan, nan, none), random_pages(way.layout))
    live = none.copy()
    live[2] = NUM_CELLS - 1  # the last cell of the last page
    padding = k.copy()
    padding[np.arange(ROWS) != 2] = np.nan
    assert same_bits(written(way, padding, v, live), written(way, k, v, live))


@each(PLAIN)
def test_every_value_keeps_its_bits(way: Way) -> None:
    """Subnormals, both zeros and both infinities too."""
    dtype = way.layout.dtype
    shape = (ROWS, KV_HEADS, HEAD_DIM)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    infinity = int(np.array(np.inf, dtype).view(unsigned))
    patterns = np.linspace(0, infinity, math.prod(shape)).astype(unsigned).reshape(shape)
    patterns[0, 0, 1] = 1  # the smallest subnormal
    sign = unsigned.type(1 << (8 * dtype.itemsize - 1))
    k, v = patterns.view(dtype), (patterns | sign).view(dtype)
    slots = np.arange(ROWS, dtype=np.int32)
    assert same_bits(written(way, k, v, slots), expected(way, k, v, slots))


def angles() -> tuple[Array, Array]:
    """Cosines and sines of far positions."""
    turns = 10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angle = (np.arange(ROWS) * 37)[:, None] * turns
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def rotated(k: Array, cos: Array, sin: Array) -> Array:
    a, b = np.split(k.astype(np.float32), 2, -1)
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1).astype(k.dtype)


def numbers(pages: KVPages) -> Array:
    cells = pages.cells.astype(np.float64)
    return cells if pages.scales is None else cells * pages.scales[..., None]


@each(PLAIN + EIGHT_BIT)
def test_rotating_in_the_write_equals_rotating_before(way: Way) -> None:
    k, v = rows(way.layout)
    slots = np.arange(ROWS, dtype=np.int32)
    fused = written(way, k, v, slots, *angles())
    before = expected(way, rotated(k, *angles()), v, slots)
    assert np.array_equal(numbers(fused)[:, 1], numbers(before)[:, 1])
    # A fused multiply-add may round once where NumPy rounds twice: by a step of the type, or of
    # the cell where that tips a rounding.
    step = 2.0**-22 if way.dtype == "float32" else 2.0**-7
    if way.quantized is not None:
        step = 1 / 127 if way.quantized == "int8" else 2.0**-3
    difference = np.abs(numbers(fused) - numbers(before))[:, 0]
    assert difference.max() <= step * np.abs(k.astype(np.float64)).max()
    assert way.dtype == "float32" or (difference > 0).mean() < 0.05, "not by roundings alone"


def check_in_place(way: Way) -> None:
    """XLA aliases the whole cache, and no instruction copies or converts as much again."""
    layout, num_pages = way.layout, 256
    row = jax.ShapeDtypeStruct((ROWS, KV_HEADS, HEAD_DIM), layout.dtype)
    slots = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    call: Any = build(way)
    executable = call.lower(layout.abstract(num_pages), row, row, slots).compile()
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == layout.page_bytes * num_pages
    assert memory.temp_size_in_bytes < layout.page_bytes * num_pages / 8
    instructions = [line for line in executable.as_text().splitlines() if " = " in line]
    for line in instructions:
        if f"[{num_pages},2,{KV_HEADS},{PAGE_SIZE}" in line.split(" = ")[1].split("(")[0]:
            assert not any(f" {op}(" in line for op in ("copy", "convert", "select")), line


@each([way for way in PLAIN + EIGHT_BIT if way.platform == "cpu"])
def test_a_donated_cache_is_written_in_place(way: Way) -> None:
    check_in_place(way)

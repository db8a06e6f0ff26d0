"""Writing keys and values into pages: the right cells, no other, in place (B02)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import KVLayout, kv_write

NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM, ROWS = 6, 3, 4, 16, 8
NUM_CELLS = NUM_PAGES * PAGE_SIZE

each_storage = pytest.mark.parametrize(
    ("dtype", "platform"),
    [(jnp.float32, "cpu"), (jnp.bfloat16, "cpu"), (jnp.bfloat16, "gpu")],
    ids=["float32", "bfloat16-as-uint16", "bfloat16"],
)


def make_layout(dtype: type, platform: str) -> KVLayout:
    return KVLayout(np.dtype(dtype), KV_HEADS, HEAD_DIM, PAGE_SIZE, platform)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def random_cache(layout: KVLayout) -> np.ndarray:
    """Cells in the model's type."""
    return normal(0, *layout.shape(NUM_PAGES)).astype(layout.dtype)


def rows(layout: KVLayout) -> tuple[np.ndarray, np.ndarray]:
    shape = (ROWS, layout.num_kv_heads, layout.head_dim)
    return normal(1, *shape).astype(layout.dtype), normal(2, *shape).astype(layout.dtype)


@functools.cache
def write(layout: KVLayout) -> Callable[..., jax.Array]:
    def run(
        cache: jax.Array,
        k: jax.Array,
        v: jax.Array,
        slots: jax.Array,
        cos: jax.Array | None = None,
        sin: jax.Array | None = None,
    ) -> jax.Array:
        return kv_write(k, v, slots, cache, layout=layout, cos=cos, sin=sin)

    return jax.jit(run, donate_argnums=0)


def written(layout: KVLayout, call: Callable[..., jax.Array], *arguments: np.ndarray) -> np.ndarray:
    """Cells after the write to `random_cache`, in the model's type."""
    cache = jnp.asarray(random_cache(layout).view(layout.storage_dtype))
    return np.asarray(call(cache, *arguments)).view(layout.dtype)


def bits(cells: np.ndarray) -> np.ndarray:
    return cells.view(np.uint8)


@each_storage
def test_the_right_cells_and_no_other_bit_for_bit(dtype: type, platform: str) -> None:
    layout = make_layout(dtype, platform)
    call, (k, v) = write(layout), rows(layout)

    @settings(max_examples=50, deadline=None)
    @given(
        cells=st.lists(st.integers(0, NUM_CELLS - 1), min_size=ROWS, max_size=ROWS, unique=True),
        none=st.lists(st.sampled_from([0, 0, -1, -7]), min_size=ROWS, max_size=ROWS),
    )
    def check(cells: list[int], none: list[int]) -> None:
        slots = np.where(np.array(none) < 0, none, cells).astype(np.int32)
        want = random_cache(layout)
        for row, slot in enumerate(slots):
            if slot >= 0:
                want[slot // PAGE_SIZE, 0, :, slot % PAGE_SIZE] = k[row]
                want[slot // PAGE_SIZE, 1, :, slot % PAGE_SIZE] = v[row]
        assert np.array_equal(bits(written(layout, call, k, v, slots)), bits(want))

    check()
    assert call._cache_size() == 1  # type: ignore[attr-defined]


@each_storage
def test_rows_without_a_cell_write_nothing_whatever_they_hold(dtype: type, platform: str) -> None:
    """JAX takes index -1 for the last page: a live one in a full pool."""
    layout = make_layout(dtype, platform)
    call, (k, v) = write(layout), rows(layout)
    none = np.full(ROWS, -1, np.int32)
    nan = np.full_like(k, np.nan)
    assert np.array_equal(bits(written(layout, call, k, v, none)), bits(random_cache(layout)))
    assert np.array_equal(bits(written(layout, call, nan, nan, none)), bits(random_cache(layout)))
    live = none.copy()
    live[2] = NUM_CELLS - 1  # the last cell of the last page
    padding = k.copy()
    padding[np.arange(ROWS) != 2] = np.nan
    one = written(layout, call, k, v, live)
    assert np.array_equal(bits(written(layout, call, padding, v, live)), bits(one))


@each_storage
def test_every_value_keeps_its_bits(dtype: type, platform: str) -> None:
    """Subnormals, both zeros and both infinities too."""
    layout = make_layout(dtype, platform)
    shape = (ROWS, KV_HEADS, HEAD_DIM)
    unsigned = np.dtype(f"u{layout.dtype.itemsize}")
    infinity = int(np.array(np.inf, layout.dtype).view(unsigned))
    patterns = np.linspace(0, infinity, math.prod(shape)).astype(unsigned).reshape(shape)
    patterns[0, 0, 1] = 1  # the smallest subnormal
    sign = unsigned.type(1 << (8 * layout.dtype.itemsize - 1))
    k, v = patterns.view(layout.dtype), (patterns | sign).view(layout.dtype)
    after = written(layout, write(layout), k, v, np.arange(ROWS, dtype=np.int32))
    for part, want in enumerate((k, v)):
        got = after[: ROWS // PAGE_SIZE, part].swapaxes(1, 2).reshape(shape)
        assert np.array_equal(bits(np.ascontiguousarray(got)), bits(want))


@each_storage
def test_rotating_in_the_write_equals_rotating_before(dtype: type, platform: str) -> None:
    layout = make_layout(dtype, platform)
    k, v = rows(layout)
    position = np.arange(ROWS) * 37
    angles = position[:, None] * 10000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = np.split(k.astype(np.float32), 2, -1)
    c, s = cos[:, None], sin[:, None]
    rotated = np.concatenate([a * c - b * s, b * c + a * s], -1).astype(layout.dtype)
    slots = np.arange(ROWS, dtype=np.int32)
    fused = written(layout, write(layout), k, v, slots, cos, sin)
    before = written(layout, write(layout), rotated, v, slots)
    assert np.array_equal(bits(fused[:, 1]), bits(before[:, 1]))
    # A fused multiply-add may round once where NumPy rounds twice.
    step = 2.0**-22 if layout.dtype.itemsize == 4 else 2.0**-7
    difference = np.abs(fused.astype(np.float64) - before.astype(np.float64))
    assert difference.max() <= step * np.abs(k.astype(np.float64)).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_donated_cache_is_written_in_place(dtype: type) -> None:
    """XLA aliases the whole cache, and no instruction copies or converts as much again."""
    layout = make_layout(dtype, "cpu")
    num_pages = 512
    cache = jax.ShapeDtypeStruct(layout.shape(num_pages), layout.storage_dtype)
    row = jax.ShapeDtypeStruct((ROWS, KV_HEADS, HEAD_DIM), layout.dtype)
    slots = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    executable = write(layout).lower(cache, row, row, slots).compile()  # type: ignore[attr-defined]
    memory = executable.memory_analysis()
    assert memory.alias_size_in_bytes == layout.page_bytes * num_pages
    assert memory.temp_size_in_bytes < layout.page_bytes * num_pages / 8
    cache_sized = f"[{num_pages},2,{KV_HEADS},{PAGE_SIZE},{HEAD_DIM}]"
    instructions = [line for line in executable.as_text().splitlines() if " = " in line]
    for line in instructions:
        if cache_sized in line.split(" = ")[1].split("(")[0]:
            assert not any(f" {op}(" in line for op in ("copy", "convert", "select")), line

"""One layer's pages: shapes, storage types, loads and page copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import NULL_PAGE, KVLayout, KVPages
from tests.kernels.paged import Array, quantize

LAYOUT = KVLayout(np.dtype(jnp.bfloat16), num_kv_heads=3, head_dim=4, page_size=2, platform="cpu")
INT8, FP8 = np.dtype(np.int8), np.dtype(jnp.float8_e4m3fn)
NUM_PAGES = 5
LAYOUTS = [
    replace(LAYOUT, dtype=np.dtype(dtype), platform=platform, quantized=quantized)
    for platform in ("cpu", "gpu")
    for dtype, quantized in [
        (np.float32, None),
        (jnp.bfloat16, None),
        (jnp.bfloat16, INT8),
        (jnp.bfloat16, FP8),
    ]
]

each_layout = pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda x: f"{x.platform}-{x.dtype}-{x.cell_dtype}"
)


def cells(layout: KVLayout) -> Array:
    """Distinct values in every cell, in the model's type."""
    shape = layout.abstract(NUM_PAGES).cells.shape
    return np.arange(np.prod(shape)).reshape(shape).astype(layout.dtype)


def narrow(layout: KVLayout) -> KVPages:
    """The same as the pages hold them, before they are stored."""
    if layout.quantized is None:
        return KVPages(cells(layout))
    return KVPages(*quantize(cells(layout), layout.quantized))


def stored(layout: KVLayout) -> KVPages:
    held = narrow(layout)
    held = held._replace(cells=held.cells.view(layout.storage_dtype))
    return jax.tree.map(jnp.asarray, held)


def read(layout: KVLayout) -> Array:
    """What a read of the cells gives."""
    held = narrow(layout)
    if layout.quantized is None:
        return held.cells
    return (held.cells.astype(np.float32) * held.scales[..., None]).astype(layout.dtype)


@pytest.mark.parametrize(
    ("dtype", "platform", "quantized", "storage", "page_bytes"),
    [
        (jnp.bfloat16, "cpu", None, np.uint16, 96),
        (jnp.float16, "cpu", None, np.uint16, 96),
        (jnp.float32, "cpu", None, np.float32, 192),
        (jnp.bfloat16, "gpu", None, jnp.bfloat16, 96),
        (jnp.bfloat16, "tpu", None, jnp.bfloat16, 96),
        (jnp.bfloat16, "cpu", INT8, np.int8, 48 + 48),  # 12 scales of 4 bytes
        (jnp.bfloat16, "cpu", FP8, np.uint8, 48 + 48),
        (jnp.bfloat16, "gpu", FP8, FP8, 48 + 48),
        (jnp.float32, "gpu", INT8, np.int8, 48 + 48),
    ],
)
def test_storage(dtype: Any, platform: str, quantized: Any, storage: Any, page_bytes: int) -> None:
    layout = replace(LAYOUT, dtype=np.dtype(dtype), platform=platform, quantized=quantized)
    assert layout.storage_dtype == np.dtype(storage)
    abstract = layout.abstract(NUM_PAGES)
    assert abstract.cells.shape == (5, 2, 3, 2, 4)
    assert abstract.cells.dtype == layout.storage_dtype
    pages = stored(layout)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
        lambda x: (x.shape, x.dtype), pages
    )
    assert sum(x.nbytes for x in jax.tree.leaves(pages)) == page_bytes * NUM_PAGES
    assert layout.page_bytes == page_bytes
    assert layout.num_pages(pages) == NUM_PAGES
    assert layout.local_kv_heads(pages) == 3


def test_a_shard_holds_fewer_heads() -> None:
    spec = PartitionSpec(None, None, "tensor", None, None)
    assert LAYOUT.partition_spec("tensor") == KVPages(spec)
    assert LAYOUT.partition_spec(None).cells == PartitionSpec(None, None, None, None, None)
    share = jax.tree.map(lambda x: x[:, :, :1], stored(LAYOUT))
    assert LAYOUT.local_kv_heads(share) == 1
    quantized = replace(LAYOUT, quantized=INT8).partition_spec("tensor")
    assert quantized == KVPages(spec, PartitionSpec(None, None, "tensor", None))


@each_layout
def test_loads_give_keys_and_values_bit_for_bit(layout: KVLayout) -> None:
    pages, want = stored(layout), read(layout)
    numbers = np.array([[4, 0], [2, 4]])
    for got, part in zip(jax.jit(layout.load)(pages, numbers), (0, 1), strict=True):
        assert got.dtype == layout.dtype
        np.testing.assert_array_equal(np.asarray(got), want[numbers, part])
    for got, part in zip(jax.jit(layout.load_one)(pages, 3), (0, 1), strict=True):
        np.testing.assert_array_equal(np.asarray(got.astype(layout.dtype)), want[3, part])


@each_layout
def test_what_is_stored_is_what_is_read(layout: KVLayout) -> None:
    bits = layout.as_stored(jnp.asarray(narrow(layout).cells))
    assert bits.dtype == layout.storage_dtype
    np.testing.assert_array_equal(layout.as_cells(bits), narrow(layout).cells)


def test_a_number_past_the_last_page_reads_a_page_and_not_nan() -> None:
    """Such numbers stand in padding only; what is read there is masked, but must be a number."""
    keys, _ = jax.jit(LAYOUT.load)(stored(LAYOUT), np.array([99]))
    assert np.isfinite(np.asarray(keys, np.float32)).all()


@each_layout
def test_copy_pages(layout: KVLayout) -> None:
    """Pairs without a target copy nothing, and copies read what was there before all of them."""
    source, target = jnp.array([1, 3, 2, 4]), jnp.array([3, 2, -1, 1])
    after = jax.jit(layout.copy_pages)(stored(layout), source, target)
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(stored(layout)), strict=True):
        want = np.array(want)
        want[[3, 2, 1]] = want[[1, 3, 4]]
        np.testing.assert_array_equal(np.asarray(got), want)
    assert NULL_PAGE == 0


@each_layout
def test_pages_that_are_taken_can_be_put_elsewhere(layout: KVLayout) -> None:
    """Numbers below 0 are padding: they put nothing, and what they take is of no use."""
    taken = jax.jit(layout.take_pages)(stored(layout), jnp.array([4, 1, -1]))
    after = jax.jit(layout.put_pages)(stored(layout), jnp.array([2, 3, -1]), taken)
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(stored(layout)), strict=True):
        want = np.array(want)
        want[[2, 3]] = want[[4, 1]]
        np.testing.assert_array_equal(np.asarray(got), want)

"""One layer's pages: shapes, storage types, loads and page copies."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import NULL_PAGE, KVLayout

LAYOUT = KVLayout(np.dtype(jnp.bfloat16), num_kv_heads=3, head_dim=4, page_size=2, platform="cpu")
NUM_PAGES = 5


def cells(layout: KVLayout) -> np.ndarray:
    """Distinct values in every cell, in the model's type."""
    shape = layout.shape(NUM_PAGES)
    return np.arange(np.prod(shape)).reshape(shape).astype(layout.dtype)


def stored(layout: KVLayout) -> jax.Array:
    return jnp.asarray(cells(layout).view(layout.storage_dtype))


@pytest.mark.parametrize(
    ("dtype", "platform", "storage", "page_bytes"),
    [
        (jnp.bfloat16, "cpu", np.uint16, 96),
        (jnp.float16, "cpu", np.uint16, 96),
        (jnp.float32, "cpu", np.float32, 192),
        (jnp.bfloat16, "gpu", jnp.bfloat16, 96),
        (jnp.bfloat16, "tpu", jnp.bfloat16, 96),
    ],
)
def test_storage(dtype: type, platform: str, storage: type, page_bytes: int) -> None:
    layout = replace(LAYOUT, dtype=np.dtype(dtype), platform=platform)
    assert layout.storage_dtype == np.dtype(storage)
    assert layout.shape(NUM_PAGES) == (5, 2, 3, 2, 4)
    cache = stored(layout)
    assert cache.nbytes == page_bytes * NUM_PAGES
    assert layout.page_bytes == page_bytes
    assert layout.num_pages(cache) == NUM_PAGES
    assert layout.local_kv_heads(cache) == 3


def test_a_shard_holds_fewer_heads() -> None:
    assert LAYOUT.partition_spec("tensor") == PartitionSpec(None, None, "tensor", None, None)
    assert LAYOUT.partition_spec(None) == PartitionSpec(None, None, None, None, None)
    assert LAYOUT.local_kv_heads(stored(LAYOUT)[:, :, :1]) == 1


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_loads_give_keys_and_values_bit_for_bit(dtype: type, platform: str) -> None:
    layout = replace(LAYOUT, dtype=np.dtype(dtype), platform=platform)
    cache, want = stored(layout), cells(layout)
    pages = np.array([[4, 0], [2, 4]])
    load = jax.jit(layout.load)
    for got, part in zip(load(cache, pages), (0, 1), strict=True):
        assert got.dtype == layout.dtype
        np.testing.assert_array_equal(np.asarray(got), want[pages, part])
    for got, part in zip(jax.jit(layout.load_one)(cache, 3), (0, 1), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want[3, part])


def test_a_number_past_the_last_page_reads_a_page_and_not_nan() -> None:
    """Such numbers stand in padding only; what is read there is masked, but must be a number."""
    keys, _ = jax.jit(LAYOUT.load)(stored(LAYOUT), np.array([99]))
    assert np.isfinite(np.asarray(keys, np.float32)).all()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_copy_pages(platform: str) -> None:
    """Pairs without a target copy nothing, and copies read what was there before all of them."""
    layout = replace(LAYOUT, platform=platform)
    cache, before = stored(layout), cells(layout)
    source, target = jnp.array([1, 3, 2, 4]), jnp.array([3, 2, -1, 1])
    after = np.asarray(jax.jit(layout.copy_pages)(cache, source, target)).view(layout.dtype)
    want = before.copy()
    want[[3, 2, 1]] = before[[1, 3, 4]]
    np.testing.assert_array_equal(after, want)
    assert NULL_PAGE == 0

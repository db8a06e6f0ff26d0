"""How one layer's keys and values lie in memory; nothing else in the project indexes pages.

Knows shapes, storage types and how to read and write page cells.  Does not know which page
belongs to whom: that is the scheduler's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

NULL_PAGE = 0
"""Page that no sequence owns: the target of padding in block tables."""


@dataclass(frozen=True)
class KVLayout:
    """Layout of the paged KV cache of one layer: `[pages, 2, kv_heads, page_size, head_dim]`.

    Keys are row 0 and values row 1 of the second axis.  A page of a layer is then one contiguous
    block, and one head's part of a page one contiguous `[page_size, head_dim]` tile.

    On a CPU, 16-bit floats are stored as `uint16` and bitcast on the way in and out: XLA's CPU
    backend widens a bfloat16 scatter to float32 and back, rewriting the whole buffer on every
    step, while an integer scatter is done in place.
    """

    dtype: np.dtype
    """Type of keys and values as the model computes them."""
    num_kv_heads: int
    """Heads of the whole model; a shard's arrays hold fewer."""
    head_dim: int
    """Elements per head."""
    page_size: int
    """Token positions per page."""
    platform: str
    """"cpu", "gpu" or "tpu"."""

    @property
    def storage_dtype(self) -> np.dtype:
        """Type of the array on the device."""
        as_integer = self.platform == "cpu" and self.dtype.itemsize == 2
        return np.dtype(np.uint16) if as_integer else self.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, keys and values."""
        cells = 2 * self.num_kv_heads * self.page_size
        return cells * self.head_dim * self.storage_dtype.itemsize

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Shape of one layer's cache."""
        return (num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)

    def partition_spec(self, kv_heads_axis: str | None) -> PartitionSpec:
        """How the cache is split over a mesh whose axis `kv_heads_axis` divides the KV heads."""
        return PartitionSpec(None, None, kv_heads_axis, None, None)

    def local_kv_heads(self, cache: jax.Array) -> int:
        """KV heads in `cache`: all of them, or a shard's share."""
        return int(cache.shape[2])

    def num_pages(self, cache: jax.Array) -> int:
        """Pages in `cache`, the null page included."""
        return int(cache.shape[0])

    def load(
        self,
        cache: jax.Array,
        pages: jax.Array,  # i32[...]
    ) -> tuple[jax.Array, jax.Array]:  # 2 x [..., kv_heads, page_size, head_dim]
        """Keys and values of whole pages, in the model's type."""
        cells = self._decode(cache.at[pages].get(mode="clip"))
        axis = pages.ndim
        return (
            lax.index_in_dim(cells, 0, axis, keepdims=False),
            lax.index_in_dim(cells, 1, axis, keepdims=False),
        )

    def load_one(
        self,
        cache: jax.Array,
        page: jax.Array,  # i32[]
    ) -> tuple[jax.Array, jax.Array]:  # 2 x [kv_heads, page_size, head_dim]
        """Keys and values of one page, as a slice: no gather, and it fuses into its reader."""
        cells = self._decode(lax.dynamic_index_in_dim(cache, page, keepdims=False))
        return cells[0], cells[1]

    def store(
        self,
        cache: jax.Array,
        k: jax.Array,  # [tokens, kv_heads, head_dim]
        v: jax.Array,  # [tokens, kv_heads, head_dim]
        slots: jax.Array,  # i32[tokens], page * page_size + offset, negative for none
    ) -> jax.Array:
        """Write one cell per token; negative slots write nothing.

        A negative index must not reach the scatter: JAX wraps -1 to the last element, which is
        a live page.  Those rows point one past the end instead, where `mode="drop"` drops them.
        """
        none = slots < 0
        page = jnp.where(none, cache.shape[0], slots // self.page_size)
        offset = jnp.where(none, 0, slots % self.page_size)
        cells = self._encode(jnp.stack([k, v], axis=1))
        return cache.at[page, :, :, offset].set(cells, mode="drop")

    def copy_pages(
        self,
        cache: jax.Array,
        source: jax.Array,  # i32[n]
        target: jax.Array,  # i32[n], negative for none
    ) -> jax.Array:
        """Copy whole pages; pairs with a negative target are skipped."""
        to = jnp.where(target < 0, cache.shape[0], target)
        return cache.at[to].set(cache.at[source].get(mode="clip"), mode="drop")

    def _encode(self, cells: jax.Array) -> jax.Array:
        cells = cells.astype(self.dtype)
        if self.storage_dtype == self.dtype:
            return cells
        return lax.bitcast_convert_type(cells, self.storage_dtype)

    def _decode(self, cells: jax.Array) -> jax.Array:
        if self.storage_dtype == self.dtype:
            return cells
        return lax.bitcast_convert_type(cells, self.dtype)

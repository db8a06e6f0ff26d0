"""How one layer's keys and values lie in memory; nothing else in the project indexes pages.

Knows shapes, storage types and how to read and write page cells.  Does not know which page
belongs to whom: that is the scheduler's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.quantize import quantize

NULL_PAGE = 0
"""Page that no sequence owns: the target of padding in block tables."""


class KVPages(NamedTuple):
    """The paged cache of one layer, as a `KVLayout` lays it out."""

    cells: Any  # jax.Array, or anything that stands for one: a shape, a sharding
    scales: Any = None  # f32, of quantised cells only


@dataclass(frozen=True)
class KVLayout:
    """Layout of the paged KV cache of one layer: `[pages, 2, kv_heads, page_size, head_dim]`.

    Keys are row 0 and values row 1 of the second axis.  A page of a layer is then one contiguous
    block, and one head's part of a page one contiguous `[page_size, head_dim]` tile.  Quantised
    cells have one float32 scale per token and head beside them, `[pages, 2, kv_heads, page_size]`.

    On a CPU, floats narrower than 32 bits are stored as unsigned integers and bitcast on the way
    in and out: XLA's CPU backend widens a bfloat16 scatter to float32 and back, rewriting the
    whole buffer on every step, while an integer scatter is done in place.
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
    quantized: np.dtype | None = None
    """Type of quantised cells, int8 or float8_e4m3fn; `None` for cells of type `dtype`."""

    @property
    def cell_dtype(self) -> np.dtype:
        """Type of a cell's elements."""
        return self.dtype if self.quantized is None else self.quantized

    @property
    def storage_dtype(self) -> np.dtype:
        """Type of the array on the device: `cell_dtype` or unsigned integers of its width."""
        cell = self.cell_dtype
        narrow_float = cell.itemsize < 4 and cell != np.dtype(np.int8)
        as_integer = self.platform == "cpu" and narrow_float
        return np.dtype(f"u{cell.itemsize}") if as_integer else cell

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer: keys, values and their scales."""
        leaves = jax.tree.leaves(self.abstract(1))
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    def abstract(self, num_pages: int) -> KVPages:
        """Shapes and types of one layer's cache."""
        shape = (num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)
        scales = None
        if self.quantized is not None:
            scales = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
        return KVPages(jax.ShapeDtypeStruct(shape, self.storage_dtype), scales)

    def partition_spec(self, kv_heads_axis: str | None) -> KVPages:
        """How the cache is split over a mesh whose axis `kv_heads_axis` divides the KV heads."""
        scales = None if self.quantized is None else PartitionSpec(None, None, kv_heads_axis, None)
        return KVPages(PartitionSpec(None, None, kv_heads_axis, None, None), scales)

    def local_kv_heads(self, pages: KVPages) -> int:
        """KV heads in `pages`: all of them, or a shard's share."""
        return int(pages.cells.shape[2])

    def num_pages(self, pages: KVPages) -> int:
        """Pages in `pages`, the null page included."""
        return int(pages.cells.shape[0])

    def load(
        self,
        pages: KVPages,
        numbers: jax.Array,  # i32[...]
    ) -> tuple[jax.Array, jax.Array]:  # 2 x [..., kv_heads, page_size, head_dim]
        """Keys and values of whole pages, in the model's type."""
        taken = jax.tree.map(lambda x: x.at[numbers].get(mode="clip"), pages)
        cells = self._decode(taken).astype(self.dtype)
        axis = numbers.ndim
        return (
            lax.index_in_dim(cells, 0, axis, keepdims=False),
            lax.index_in_dim(cells, 1, axis, keepdims=False),
        )

    def load_one(
        self,
        pages: KVPages,
        number: jax.Array,  # i32[]
    ) -> tuple[jax.Array, jax.Array]:  # 2 x [kv_heads, page_size, head_dim]
        """Keys and values of one page, as a slice: no gather, and it fuses into its reader.

        In the model's type, or in float32 if they are quantised.
        """
        cells = self._decode(
            jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), pages)
        )
        return cells[0], cells[1]

    def store(
        self,
        pages: KVPages,
        k: jax.Array,  # [tokens, kv_heads, head_dim]
        v: jax.Array,  # [tokens, kv_heads, head_dim]
        slots: jax.Array,  # i32[tokens], page * page_size + offset, negative for none
    ) -> KVPages:
        """Write one cell per token; negative slots write nothing.

        A negative index must not reach the scatter: JAX wraps -1 to the last element, which is
        a live page.  Those rows point one past the end instead, where `mode="drop"` drops them.
        """
        none = slots < 0
        page = jnp.where(none, self.num_pages(pages), slots // self.page_size)
        offset = jnp.where(none, 0, slots % self.page_size)
        new = self._encode(jnp.stack([k, v], axis=1))
        return jax.tree.map(
            lambda old, x: old.at[page, :, :, offset].set(x, mode="drop"), pages, new
        )

    def copy_pages(
        self,
        pages: KVPages,
        source: jax.Array,  # i32[n]
        target: jax.Array,  # i32[n], negative for none
    ) -> KVPages:
        """Copy whole pages; pairs with a negative target are skipped."""
        return self.put_pages(pages, target, self.take_pages(pages, source))

    def take_pages(
        self,
        pages: KVPages,
        numbers: jax.Array,  # i32[n]
    ) -> KVPages:
        """Whole pages as they are stored, with `n` for `pages` in their shapes."""
        return jax.tree.map(lambda x: x.at[numbers].get(mode="clip"), pages)

    def put_pages(
        self,
        pages: KVPages,
        numbers: jax.Array,  # i32[n], negative for none
        taken: KVPages,
    ) -> KVPages:
        """Put what `take_pages` took into other pages."""
        to = jnp.where(numbers < 0, self.num_pages(pages), numbers)
        return jax.tree.map(lambda x, new: x.at[to].set(new, mode="drop"), pages, taken)

    def as_stored(self, cells: jax.Array) -> jax.Array:
        """Cells of `cell_dtype` as the array on the device holds them."""
        if self.storage_dtype == self.cell_dtype:
            return cells
        return lax.bitcast_convert_type(cells, self.storage_dtype)

    def as_cells(self, stored: jax.Array) -> jax.Array:
        """The inverse of `as_stored`."""
        if self.storage_dtype == self.cell_dtype:
            return stored
        return lax.bitcast_convert_type(stored, self.cell_dtype)

    def _encode(self, x: jax.Array) -> KVPages:
        if self.quantized is None:
            return KVPages(self.as_stored(x.astype(self.dtype)))
        cells, scales = quantize(x, self.quantized)
        return KVPages(self.as_stored(cells), scales)

    def _decode(self, pages: KVPages) -> jax.Array:
        """Cells as numbers: in the model's type, or float32 if quantised."""
        cells = self.as_cells(pages.cells)
        if self.quantized is None:
            return cells
        return cells.astype(jnp.float32) * pages.scales[..., None]

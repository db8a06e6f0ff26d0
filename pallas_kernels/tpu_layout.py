"""The cache layout of TPUs, behind the interface of every other layout.

The one that JAX's in-tree attention kernel reads and that plain XLA writes in place.  Knows padding
and the order of axes.  Does not know the kernel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.layout import KVLayout, KVPages

LANES = 128
"""Elements of a row of a TPU's vector register: heads are padded to a whole row."""


@dataclass(frozen=True)
class TPULayout(KVLayout):
    """Layout of one layer's cache as `[pages, page_size, 2 * heads, padded_head_dim]`.

    Head `h` has its key at `2 * h` and its value at `2 * h + 1` of the third axis, and quantised
    cells have their scales in `[pages, page_size, 2 * heads]`.  A token is then one contiguous
    block, which a write replaces whole, zeros of the padding included.  XLA:TPU scatters such
    blocks in place, where it would first transpose a cache whose axes are those of `KVLayout`.

    The kernel takes such numbers of heads only as fill tiles of 8 rows or an even part of one, and
    heads of 128 elements, and XLA copies caches of others; so a cache may be larger than its
    `head_dim` and `num_kv_heads` say: SmolLM2-135M's by 8 / 3.  Heads cannot be split over devices
    where some are padding.
    """

    @property
    def padded_kv_heads(self) -> int:
        """KV heads of the whole model that the cache has room for."""
        return padded_kv_heads(self.num_kv_heads, self.cell_dtype)

    @property
    def padded_head_dim(self) -> int:
        """Elements per head in the cache."""
        return -(-self.head_dim // LANES) * LANES

    def abstract(self, num_pages: int) -> KVPages:
        """Shapes and types of one layer's cache."""
        shape = (num_pages, self.page_size, 2 * self.padded_kv_heads, self.padded_head_dim)
        scales = None
        if self.quantized is not None:
            scales = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
        return KVPages(jax.ShapeDtypeStruct(shape, self.storage_dtype), scales)

    def partition_spec(self, kv_heads_axis: str | None) -> KVPages:
        """How the cache is split over a mesh whose axis `kv_heads_axis` divides the KV heads."""
        scales = None if self.quantized is None else PartitionSpec(None, None, kv_heads_axis)
        return KVPages(PartitionSpec(None, None, kv_heads_axis, None), scales)

    def local_kv_heads(self, pages: KVPages) -> int:
        """KV heads in `pages`, padding not counted: all of them, or a shard's share.

        Raises:
            ValueError: it is a share, and some heads are padding.
        """
        held = int(pages.cells.shape[2]) // 2
        if held == self.padded_kv_heads:
            return self.num_kv_heads
        if self.padded_kv_heads != self.num_kv_heads:
            raise ValueError(
                f"on a TPU {self.num_kv_heads} KV heads are padded to {self.padded_kv_heads} and "
                f"cannot be split over devices; use tensor_parallel_size=1"
            )
        return held

    def load(
        self,
        pages: KVPages,
        numbers: jax.Array,  # i32[...]
    ) -> tuple[jax.Array, jax.Array]:  # 2 x [..., kv_heads, page_size, head_dim]
        """Keys and values of whole pages, in the model's type."""
        taken = jax.tree.map(lambda x: x.at[numbers].get(mode="clip"), pages)
        k, v = self._keys_and_values(pages, taken)
        return k.astype(self.dtype), v.astype(self.dtype)

    def load_one(
        self,
        pages: KVPages,
        number: jax.Array,  # i32[]
    ) -> tuple[jax.Array, jax.Array]:  # 2 x [kv_heads, page_size, head_dim]
        """Keys and values of one page, as a slice.

        In the model's type, or in float32 if they are quantised.
        """
        taken = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), pages)
        return self._keys_and_values(pages, taken)

    def store(
        self,
        pages: KVPages,
        k: jax.Array,  # [tokens, kv_heads, head_dim]
        v: jax.Array,  # [tokens, kv_heads, head_dim]
        slots: jax.Array,  # i32[tokens], page * page_size + offset, negative for none
    ) -> KVPages:
        """Write one cell per token; negative slots write nothing.

        The padding of a live cell is zero whatever was there: a query's padding times the key's
        is part of a logit.
        """
        none = slots < 0
        page = jnp.where(none, self.num_pages(pages), slots // self.page_size)
        offset = jnp.where(none, 0, slots % self.page_size)
        shape = pages.cells.shape[2:]
        missing = (shape[0] // 2 - k.shape[1], shape[1] - k.shape[2])
        new = jnp.pad(
            jnp.stack([k, v], axis=2),  # [tokens, kv_heads, 2, head_dim]
            ((0, 0), (0, missing[0]), (0, 0), (0, missing[1])),
        )
        return jax.tree.map(
            lambda old, x: old.at[page, offset].set(x, mode="drop"),
            pages,
            self._encode(new.reshape(-1, *shape)),
        )

    def _keys_and_values(
        self,
        pages: KVPages,
        taken: KVPages,  # cells [..., page_size, combined heads, padded_head_dim]
    ) -> tuple[jax.Array, jax.Array]:
        heads = self.local_kv_heads(pages)
        cells = self._decode(taken)[..., : 2 * heads, : self.head_dim]
        cells = cells.reshape(*cells.shape[:-2], heads, 2, self.head_dim)
        k, v = (lax.index_in_dim(cells, part, -2 % cells.ndim, keepdims=False) for part in (0, 1))
        return k.swapaxes(-2, -3), v.swapaxes(-2, -3)


def padded_kv_heads(num_kv_heads: int, dtype: np.dtype) -> int:
    """The least number of heads from `num_kv_heads` up that fills tiles.

    Keys and values together, packed into 32-bit rows, are 1, 2, 4 or a multiple of 8 rows.
    """
    packing = 4 // dtype.itemsize
    for heads in itertools.count(num_kv_heads):
        rows, rest = divmod(2 * heads, packing)
        if rest == 0 and (rows in (1, 2, 4) or rows % 8 == 0):
            return heads
    raise AssertionError("some multiple of 16 is next")


def tpu_layout(layout: KVLayout) -> KVLayout:
    """The layout of the same sizes for a TPU; that of another platform is left as it is."""
    if layout.platform != "tpu" or isinstance(layout, TPULayout):
        return layout
    return TPULayout(**{field.name: getattr(layout, field.name) for field in fields(layout)})

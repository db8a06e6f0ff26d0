"""The cache layout that the CPU kernels read, behind the interface of every other layout."""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels.layout import KVLayout, KVPages


@dataclass(frozen=True)
class CPULayout(KVLayout):
    """Layout of one layer's cache as `[pages, kv_heads, 2, page_size * head_dim]`.

    A head's keys in a page are `[head_dim / 2, page_size, 2]` and its values
    `[page_size / 2, head_dim, 2]`: the pairs that a product of bfloat16 pairs sums over lie
    together, and its lanes side by side.  See `src/attention.h`.
    """

    def abstract(self, num_pages: int) -> KVPages:
        """Shapes and types of one layer's cache."""
        shape = (num_pages, self.num_kv_heads, 2, self.page_size * self.head_dim)
        return KVPages(jax.ShapeDtypeStruct(shape, self.storage_dtype))

    def partition_spec(self, kv_heads_axis: str | None) -> KVPages:
        """How the cache is split over a mesh whose axis `kv_heads_axis` divides the KV heads."""
        return KVPages(PartitionSpec(None, kv_heads_axis, None, None))

    def local_kv_heads(self, pages: KVPages) -> int:
        """KV heads in `pages`: all of them, or a shard's share."""
        return int(pages.cells.shape[1])

    def load(
        self,
        pages: KVPages,
        numbers: jax.Array,  # i32[...]
    ) -> tuple[jax.Array, jax.Array]:  # 2 x [..., kv_heads, page_size, head_dim]
        """Keys and values of whole pages, in the model's type."""
        return self._split(pages.cells.at[numbers].get(mode="clip"))

    def load_one(
        self,
        pages: KVPages,
        number: jax.Array,  # i32[]
    ) -> tuple[jax.Array, jax.Array]:  # 2 x [kv_heads, page_size, head_dim]
        """Keys and values of one page."""
        return self._split(lax.dynamic_index_in_dim(pages.cells, number, keepdims=False))

    def store(
        self,
        pages: KVPages,
        k: jax.Array,  # [tokens, kv_heads, head_dim]
        v: jax.Array,  # [tokens, kv_heads, head_dim]
        slots: jax.Array,  # i32[tokens], page * page_size + offset, negative for none
    ) -> KVPages:
        """Write one cell per token; negative slots write nothing."""
        none = slots < 0
        page = jnp.where(none, self.num_pages(pages), slots // self.page_size)[:, None, None, None]
        t = (slots % self.page_size)[:, None]
        d = jnp.arange(self.head_dim)
        key_at = d // 2 * 2 * self.page_size + d % 2 + t * 2
        value_at = d * 2 + t // 2 * 2 * self.head_dim + t % 2
        place = jnp.stack([key_at, value_at], axis=1)[:, None]  # [tokens, 1, 2, head_dim]
        head = jnp.arange(k.shape[1])[None, :, None, None]
        part = jnp.arange(2)[None, None, :, None]
        new = self.as_stored(jnp.stack([k, v], axis=2).astype(self.dtype))
        return KVPages(pages.cells.at[page, head, part, place].set(new, mode="drop"))

    def _split(self, stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        cells = self.as_cells(stored)
        keys, values = cells[..., 0, :], cells[..., 1, :]
        lead, size, dim = keys.shape[:-1], self.page_size, self.head_dim
        k = keys.reshape(*lead, dim // 2, size, 2).swapaxes(-3, -2).reshape(*lead, size, dim)
        v = values.reshape(*lead, size // 2, dim, 2).swapaxes(-2, -1).reshape(*lead, size, dim)
        return k, v


def cpu_layout(layout: KVLayout) -> KVLayout:
    """The layout of the same sizes for the CPU kernels."""
    if isinstance(layout, CPULayout):
        return layout
    return CPULayout(**{field.name: getattr(layout, field.name) for field in fields(layout)})

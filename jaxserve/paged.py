"""Attention of one step: the write of its keys and values, then the reading of all of theirs.

Between the model, which calls it as `Attend`, and the kernels, which know no batches.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.batch import DECODES, Batch
from jaxserve.shapes import StepShape
from jaxserve.spec import TENSOR_AXIS, Cache, StepSpec
from pallas_kernels import Plan, items_bound, kv_write, make_plan, ragged_paged_attention


class PagedAttention:
    """`Attend` over the paged cache: writes the rows' keys and values, then reads all of theirs.

    Lives for one trace; `cache` holds the layers' arrays as they are after the last call.
    """

    def __init__(
        self,
        spec: StepSpec,
        shape: StepShape,
        mesh: Mesh,
        cache: Cache,
        block_tables: jax.Array,  # i32[rows, pages_per_seq]
        batch: Batch,
    ) -> None:
        """Lay out the step's attention work, once for all layers."""
        self.cache = list(cache)
        self._spec, self._shape, self._mesh = spec, shape, mesh
        self._tables = block_tables
        decodes = batch.flags & DECODES != 0
        live = batch.length > 0
        self._decode_lens = jnp.where(live & decodes, batch.start + 1, 0)
        chunk_lens = jnp.where(live & ~decodes, batch.length, 0)
        self._chunk_kv_lens = jnp.where(chunk_lens > 0, batch.start + batch.length, 0)
        self._chunk_cu = jnp.concatenate(
            [jnp.zeros(1, jnp.int32), jnp.cumsum(chunk_lens, dtype=jnp.int32)]
        )
        self._plans = {
            window: self._plan(window, chunk_lens) for window in set(spec.model.sliding_windows)
        }
        self._slots = self._cells(batch, decodes & live)

    def _plan(self, window: int | None, chunk_lens: jax.Array) -> Plan | None:
        if not self._shape.chunk:
            return None
        return make_plan(
            self._chunk_kv_lens,
            chunk_lens,
            num_items=items_bound(self._shape.chunk, self._shape.rows, self._spec.block_q),
            block_q=self._spec.block_q,
            window=window,
        )

    def _cells(self, batch: Batch, decodes: jax.Array) -> jax.Array:
        """Cache cell of each model row, -1 for rows that write nothing."""
        rows, page_size = self._shape.rows, self._spec.layout.page_size
        row = jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), batch.row])
        position = jnp.concatenate([batch.start, batch.position])
        writes = jnp.concatenate([decodes, batch.row < rows])
        page = self._tables[jnp.minimum(row, rows - 1), position // page_size]
        return jnp.where(writes, page * page_size + position % page_size, -1)

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Write, then attend, on every shard of the KV heads by itself."""
        heads = PartitionSpec(None, TENSOR_AXIS, None)
        pages = self._spec.layout.partition_spec(TENSOR_AXIS)
        window = self._spec.model.sliding_windows[layer]
        shared = (
            self._slots,
            self._tables,
            self._decode_lens,
            self._chunk_kv_lens,
            self._chunk_cu,
            self._plans[window],
        )
        run = jax.shard_map(
            partial(self._local, window),
            mesh=self._mesh,
            in_specs=(heads, heads, heads, pages, PartitionSpec()),
            out_specs=(heads, pages),
            check_vma=False,
        )
        out, self.cache[layer] = run(q, k, v, self.cache[layer], shared)
        return out

    def _local(
        self,
        window: int | None,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        shared: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, Plan | None],
    ) -> tuple[jax.Array, jax.Array]:
        slots, tables, decode_lens, chunk_kv_lens, chunk_cu, plan = shared
        spec, rows = self._spec, self._shape.rows
        cache = kv_write(k, v, slots, cache, layout=spec.layout, implementation=spec.attention)
        attend = partial(
            ragged_paged_attention,
            layout=spec.layout,
            sm_scale=spec.model.head_dim**-0.5,
            block_kv=spec.block_kv,
            window=window,
            implementation=spec.attention,
        )
        each = jnp.arange(rows + 1, dtype=jnp.int32)
        out = attend(q[:rows], cache, tables, decode_lens, each, None, split=True, block_q=1)
        if self._shape.chunk:
            chunk = attend(
                q[rows:],
                cache,
                tables,
                chunk_kv_lens,
                chunk_cu,
                plan,
                split=False,
                block_q=spec.block_q,
            )
            out = jnp.concatenate([out, chunk])
        return out, cache

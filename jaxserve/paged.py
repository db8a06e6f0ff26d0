"""Attention of one step: the write of its keys and values, then the reading of all of theirs.

Between the model, which calls it as `Attend`, and the kernels, which know no batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxserve.batch import DECODES, Batch
from jaxserve.models.llama import Rotation
from jaxserve.shapes import StepShape
from jaxserve.spec import TENSOR_AXIS, Cache, StepSpec
from pallas_kernels import (
    AttentionOptions,
    Fused,
    KVPages,
    Plan,
    Tuned,
    implementations,
    items_bound,
    kv_write,
    make_plan,
    ragged_paged_attention,
    split_items_bound,
)


class PagedAttention:
    """`Attend` over the paged cache: writes the rows' keys and values, then reads all of theirs.

    Lives for one trace; `cache` holds the layers' pages as they are after the last call.  Attention
    is computed in the type of the pages.
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
        self._implementation = implementations()[spec.attention]
        decodes = batch.flags & DECODES != 0
        live = batch.length > 0
        self._decode_lens = jnp.where(live & decodes, batch.start + 1, 0)
        chunk_lens = jnp.where(live & ~decodes, batch.length, 0)
        self._chunk_kv_lens = jnp.where(chunk_lens > 0, batch.start + batch.length, 0)
        self._chunk_cu = jnp.concatenate(
            [jnp.zeros(1, jnp.int32), jnp.cumsum(chunk_lens, dtype=jnp.int32)]
        )
        self._plans = {
            window: self._plans_of(window, chunk_lens) for window in set(spec.model.sliding_windows)
        }
        self._slots = self._cells(batch, decodes & live)

    def _plans_of(self, window: int | None, chunk_lens: jax.Array) -> tuple[Plan, Plan | None]:
        """Work lists of decode and of chunk rows for the layers of a window."""
        shape, decode, prefill = self._shape, self._spec.decode, self._spec.prefill
        assert decode.chunk_kv is not None
        longest = self._spec.sizes.max_model_len
        decode_plan = make_plan(
            self._decode_lens,
            jnp.ones_like(self._decode_lens),
            num_items=split_items_bound(
                shape.rows, longest, decode.chunk_kv, window, decode.block_q
            ),
            block_q=decode.block_q,
            chunk_kv=decode.chunk_kv,
            window=window,
        )
        if not shape.chunk:
            return decode_plan, None
        chunk_plan = make_plan(
            self._chunk_kv_lens,
            chunk_lens,
            num_items=items_bound(shape.chunk, shape.rows, prefill.block_q),
            block_q=prefill.block_q,
            window=window,
        )
        return decode_plan, chunk_plan

    def _cells(self, batch: Batch, decodes: jax.Array) -> jax.Array:
        """Cache cell of each model row, -1 for rows that write nothing."""
        rows, page_size = self._shape.rows, self._spec.layout.page_size
        row = jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), batch.row])
        position = jnp.concatenate([batch.start, batch.position])
        writes = jnp.concatenate([decodes, batch.row < rows])
        page = self._tables[jnp.minimum(row, rows - 1), position // page_size]
        return jnp.where(writes, page * page_size + position % page_size, -1)

    def __call__(self, layer: int, qkv: jax.Array, rotate: Rotation) -> jax.Array:
        """Write, then attend, on every shard of the KV heads by itself."""
        heads = PartitionSpec(None, TENSOR_AXIS)
        pages = self._spec.layout.partition_spec(TENSOR_AXIS)
        window = self._spec.model.sliding_windows[layer]
        shared = (
            self._slots,
            self._tables,
            self._decode_lens,
            self._chunk_kv_lens,
            self._chunk_cu,
            *self._plans[window],
        )
        fused = self._implementation.fused
        local: Callable[..., tuple[jax.Array, KVPages]]
        specs: tuple[PartitionSpec, ...]
        if fused is None:
            dtype = self._spec.layout.dtype
            new = tuple(x.astype(dtype) for x in rotate.split(qkv))
            local, specs = self._local, (heads, heads, heads)
        else:
            assert rotate.used is not None
            new = (qkv, rotate.used, rotate.cos, rotate.sin)
            local, specs = partial(self._fused, fused), (heads, *(PartitionSpec(),) * 3)
        run = jax.shard_map(
            partial(local, window),
            mesh=self._mesh,
            in_specs=(*specs, pages, PartitionSpec()),
            out_specs=(heads, pages),
            check_vma=False,
        )
        out, self.cache[layer] = run(*new, self.cache[layer], shared)
        return out.astype(rotate.dtype)

    def _fused(
        self,
        fused: Fused,
        window: int | None,
        qkv: jax.Array,
        used: jax.Array,
        cos: jax.Array,
        sin: jax.Array,
        pages: KVPages,
        shared: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, Plan, Plan | None],
    ) -> tuple[jax.Array, KVPages]:
        slots, tables, decode_lens, chunk_kv_lens, chunk_cu, *_ = shared
        decode = self._spec.decode
        options = AttentionOptions(
            layout=self._spec.layout,
            sm_scale=self._spec.model.head_dim**-0.5,
            split=True,
            block_q=decode.block_q,
            block_kv=decode.block_kv,
            window=window,
            soft_cap=None,
            launch=decode.launch,
        )
        return fused(
            qkv,
            used,
            cos,
            sin,
            slots,
            pages,
            tables,
            decode_lens,
            chunk_kv_lens,
            chunk_cu,
            None,
            options,
        )

    def _local(
        self,
        window: int | None,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        pages: KVPages,
        shared: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, Plan, Plan | None],
    ) -> tuple[jax.Array, KVPages]:
        slots, tables, decode_lens, chunk_kv_lens, chunk_cu, decode_plan, chunk_plan = shared
        spec, rows = self._spec, self._shape.rows
        pages = kv_write(k, v, slots, pages, layout=spec.layout, implementation=spec.attention)
        attend = partial(
            ragged_paged_attention,
            layout=spec.layout,
            sm_scale=spec.model.head_dim**-0.5,
            window=window,
            implementation=spec.attention,
        )

        def form(tuned: Tuned) -> dict[str, Any]:
            return {"block_q": tuned.block_q, "block_kv": tuned.block_kv, "launch": tuned.launch}

        each = jnp.arange(rows + 1, dtype=jnp.int32)
        decode = (pages, tables, decode_lens, each, decode_plan)
        out = attend(q[:rows], *decode, split=True, **form(spec.decode))
        if chunk_plan is not None:
            chunk = (pages, tables, chunk_kv_lens, chunk_cu, chunk_plan)
            rest = attend(q[rows:], *chunk, split=False, **form(spec.prefill))
            out = jnp.concatenate([out, rest])
        return out, pages

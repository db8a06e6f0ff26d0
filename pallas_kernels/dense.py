"""The reference implementation: every page gathered, one masked softmax in float32.

Nothing clever, so that its words are those of `ragged_paged_attention`; slow, and as large as
all rows times the longest block table.  For tests, and to compare with on a device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import KVPages
from pallas_kernels.plan import Plan
from pallas_kernels.registry import AttentionOptions
from pallas_kernels.rows import row_positions


def attention(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    plan: Plan,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> jax.Array:
    """`ragged_paged_attention`, row by row."""
    layout = options.layout
    group = q.shape[1] // layout.local_kv_heads(pages)
    seq, seen = row_positions(q.shape[0], kv_lens, cu_q_lens)

    def row(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, table, length = args
        k, v = (_by_query_head(x, group) for x in layout.load(pages, table))
        position = jnp.arange(k.shape[1], dtype=jnp.int32)
        keep = position < length
        if options.window is not None:
            keep &= position >= length - options.window
        k, v = (jnp.where(keep[None, :, None], x, 0.0) for x in (k, v))
        logits = options.sm_scale * _product("hd,htd->ht", query.astype(jnp.float32), k)
        if options.soft_cap is not None:
            logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
        logits = jnp.where(keep, logits, -jnp.inf)
        if sinks is not None:
            logits = jnp.concatenate([logits, sinks[:, None]], axis=1)
        weights = jax.nn.softmax(logits, axis=1)[:, : k.shape[1]]
        return jnp.where(length > 0, _product("ht,htd->hd", weights, v), 0.0)

    return lax.map(row, (q, block_tables[seq], seen)).astype(q.dtype)


def _by_query_head(x: jax.Array, group: int) -> jax.Array:
    """`[pages, kv_heads, page_size, head_dim]` -> f32`[q_heads, keys, head_dim]`."""
    joined = x.astype(jnp.float32).swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[-1])
    return jnp.repeat(joined, group, axis=0)


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(axes, a, b, precision=lax.Precision.HIGHEST)

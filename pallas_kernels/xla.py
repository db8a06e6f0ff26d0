"""Plain XLA implementation: the production path of CPUs and the fallback everywhere else.

Three forms of the same attention.  Decode rows on a CPU go one by one, each over its own pages
only (`lax.map` around a `fori_loop`: the cost follows every row's own length, and the page slice
fuses into the products).  Decode rows elsewhere go all at once, over blocks of pages up to the
longest live row.  Prefill chunks walk the plan's items, a block of query rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import NULL_PAGE, KVLayout, KVPages
from pallas_kernels.plan import Plan
from pallas_kernels.registry import AttentionOptions
from pallas_kernels.rows import rotate_half, row_positions
from pallas_kernels.softmax import MASK


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
    """`ragged_paged_attention` in plain XLA."""
    kv_heads = options.layout.local_kv_heads(pages)
    grouped = q.reshape(q.shape[0], kv_heads, -1, q.shape[-1])
    finish = _finish(sinks, kv_heads)
    if not options.split:
        call = (kv_lens, cu_q_lens, plan)
        out = _chunk_rows(grouped, pages, block_tables, *call, options, finish)
    else:
        rows = row_positions(q.shape[0], kv_lens, cu_q_lens)
        decode = _rows_one_by_one if options.layout.platform == "cpu" else _rows_together
        out = decode(grouped, pages, block_tables, *rows, options, finish)
    return out.reshape(q.shape).astype(q.dtype)


def write(
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    pages: KVPages,
    layout: KVLayout,
    cos: jax.Array | None,
    sin: jax.Array | None,
) -> KVPages:
    """`kv_write` in plain XLA."""
    if cos is not None and sin is not None:
        k = rotate_half(k, cos, sin).astype(k.dtype)
    return layout.store(pages, k, v, slots)


State = tuple[jax.Array, jax.Array, jax.Array]
"""Running softmax over key blocks: weighted sum, largest logit, sum of weights."""
Finish = Callable[[State], jax.Array]
"""From the state after all keys, `[heads..., rows, head_dim]`, to the attention."""


def _start(shape: tuple[int, ...], head_dim: int) -> State:
    return (
        jnp.zeros((*shape, head_dim), jnp.float32),
        jnp.full((*shape, 1), MASK, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
    )


def _rescale(
    state: State, logits: jax.Array, keep: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Old sum rescaled to the new maximum, the new maximum and weight sum, new weights."""
    total, largest, weight = state
    logits = jnp.where(keep, logits, MASK)
    new = jnp.maximum(largest, logits.max(-1, keepdims=True))
    p = jnp.where(keep, jnp.exp(logits - new), 0.0)
    shrink = jnp.exp(largest - new)
    return total * shrink, new, weight * shrink + p.sum(-1, keepdims=True), p


def _finish(sinks: jax.Array | None, kv_heads: int) -> Finish:
    """Normalisation of the last state; a sink joins here, once, as one more weight."""

    def finish(state: State) -> jax.Array:
        total, largest, weight = state
        if sinks is not None:
            rows = total.shape[-2]  # query heads, or query rows of `rows // group` tokens
            each = jnp.tile(sinks.reshape(kv_heads, -1), rows * kv_heads // sinks.size)[..., None]
            new = jnp.maximum(largest, each)
            shrink = jnp.exp(largest - new)
            total, weight = total * shrink, weight * shrink
            weight = weight + jnp.exp(each - new)
        return total / jnp.where(weight > 0, weight, 1.0)

    return finish


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum accumulated in float32; float32 operands are not rounded to TF32 or bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=jnp.float32)


def _capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _rows_one_by_one(
    q: jax.Array,  # [rows, kv_heads, group, head_dim]
    pages: KVPages,
    block_tables: jax.Array,
    seq: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    finish: Finish,
) -> jax.Array:
    layout = options.layout
    page_size = layout.page_size
    cells = jnp.arange(page_size, dtype=jnp.int32)

    def row(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        query, table, length = args
        query = query.astype(jnp.float32) * options.sm_scale
        oldest = 0 if options.window is None else jnp.maximum(length - options.window, 0)

        def page(i: jax.Array, state: State) -> State:
            k, v = layout.load_one(pages, table[i])
            position = i * page_size + cells
            keep = (position < length) & (position >= oldest)
            logits = jnp.einsum("hgd,htd->hgt", query, k.astype(jnp.float32))
            total, largest, weight, p = _rescale(
                state, _capped(logits, options.soft_cap), keep[None, None, :]
            )
            # Values of masked cells are zeroed, not only weighted zero: 0 * NaN is NaN.
            v = jnp.where(keep[None, :, None], v.astype(jnp.float32), 0.0)
            return total + jnp.einsum("hgt,htd->hgd", p, v), largest, weight

        start = _start(query.shape[:-1], query.shape[-1])
        last = (length + page_size - 1) // page_size
        return finish(lax.fori_loop(oldest // page_size, last, page, start))

    return lax.map(row, (q, block_tables[seq], lengths))


def _rows_together(
    q: jax.Array,  # [rows, kv_heads, group, head_dim]
    pages: KVPages,
    block_tables: jax.Array,
    seq: jax.Array,
    lengths: jax.Array,
    options: AttentionOptions,
    finish: Finish,
) -> jax.Array:
    layout = options.layout
    block_kv = _whole_pages(options)
    pages_per_block = block_kv // layout.page_size
    tables = _padded_tables(block_tables, pages_per_block)[seq]
    cells = jnp.arange(block_kv, dtype=jnp.int32)

    def block(i: jax.Array, state: State) -> State:
        numbers = lax.dynamic_slice_in_dim(tables, i * pages_per_block, pages_per_block, 1)
        k, v = (_joined(x) for x in layout.load(pages, numbers))  # [rows, kv_heads, keys, head_dim]
        position = i * block_kv + cells
        keep = position < lengths[:, None]
        if options.window is not None:
            keep &= position >= lengths[:, None] - options.window
        logits = _product("rhgd,rhtd->rhgt", q, k)
        total, largest, weight, p = _rescale(
            state, _capped(logits * options.sm_scale, options.soft_cap), keep[:, None, None, :]
        )
        v = jnp.where(keep[:, None, :, None], v, 0)
        out = _product("rhgt,rhtd->rhgd", p.astype(v.dtype), v)
        return total + out, largest, weight

    blocks = (lengths.max() + block_kv - 1) // block_kv
    return finish(lax.fori_loop(0, blocks, block, _start(q.shape[:-1], q.shape[-1])))


def _chunk_rows(
    q: jax.Array,  # [rows, kv_heads, group, head_dim]
    pages: KVPages,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    plan: Plan,
    options: AttentionOptions,
    finish: Finish,
) -> jax.Array:
    layout, block_q, block_kv = options.layout, options.block_q, _whole_pages(options)
    num_rows, kv_heads, group, head_dim = q.shape
    pages_per_block = block_kv // layout.page_size
    tables = _padded_tables(block_tables, pages_per_block)
    # A block that starts near the last row must not be shifted back inside by the slice.
    padded = jnp.pad(q, ((0, block_q), (0, 0), (0, 0), (0, 0)))
    tokens = jnp.arange(block_q, dtype=jnp.int32)
    cells = jnp.arange(block_kv, dtype=jnp.int32)

    def item(w: jax.Array, out: jax.Array) -> jax.Array:
        seq, q0 = plan.seq[w], plan.q0[w]
        first_row = cu_q_lens[seq] + q0
        q_len = cu_q_lens[seq + 1] - cu_q_lens[seq]
        position_q = kv_lens[seq] - q_len + q0 + tokens
        queries = lax.dynamic_slice_in_dim(padded, first_row, block_q)
        queries = queries.transpose(1, 0, 2, 3).reshape(kv_heads, block_q * group, head_dim)
        table = lax.dynamic_index_in_dim(tables, seq, keepdims=False)

        def block(i: jax.Array, state: State) -> State:
            numbers = lax.dynamic_slice_in_dim(table, i * pages_per_block, pages_per_block)
            k, v = (_joined(x) for x in layout.load(pages, numbers))  # [kv_heads, keys, head_dim]
            position = i * block_kv + cells
            keep = position <= position_q[:, None]
            if options.window is not None:
                keep &= position > position_q[:, None] - options.window
            keep = jnp.repeat(keep, group, axis=0)[None]
            logits = _product("hqd,htd->hqt", queries, k)
            total, largest, weight, p = _rescale(
                state, _capped(logits * options.sm_scale, options.soft_cap), keep
            )
            v = jnp.where((position < kv_lens[seq])[None, :, None], v, 0)
            out = _product("hqt,htd->hqd", p.astype(v.dtype), v)
            return total + out, largest, weight

        blocks = (plan.lo[w] // block_kv, (plan.hi[w] + block_kv - 1) // block_kv)
        start = _start(queries.shape[:-1], head_dim)
        rows = finish(lax.fori_loop(*blocks, block, start))
        rows = rows.reshape(kv_heads, block_q, group, head_dim).transpose(1, 0, 2, 3)
        # The block may reach over the next sequence's rows: those keep what they have.
        mine = (q0 + tokens < q_len)[:, None, None, None]
        old = lax.dynamic_slice_in_dim(out, first_row, block_q)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, rows, old), first_row, 0)

    out = jnp.zeros((num_rows + block_q, kv_heads, group, head_dim), jnp.float32)
    return lax.fori_loop(0, plan.need, item, out)[:num_rows]


def _whole_pages(options: AttentionOptions) -> int:
    """`block_kv` in whole pages: this path never reads a part of one."""
    return max(options.block_kv, options.layout.page_size)


def _joined(pages: jax.Array) -> jax.Array:
    """`[..., pages, kv_heads, page_size, head_dim]` -> `[..., kv_heads, keys, head_dim]`."""
    moved = jnp.moveaxis(pages, -4, -3)
    return moved.reshape(*moved.shape[:-3], -1, moved.shape[-1])


def _padded_tables(tables: jax.Array, multiple: int) -> jax.Array:
    """Tables as wide as whole key blocks: a slice past the end would be shifted back inside."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % multiple)), constant_values=NULL_PAGE)

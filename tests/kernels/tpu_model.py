"""What JAX's in-tree TPU attention kernel computes, in plain JAX, with its contract enforced.

The kernel itself runs on TPUs only and cannot be interpreted.  `meets_contract` is what it asks of
its caller; a call that does not gets NaN everywhere.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel


def in_tree(
    q: jax.Array,  # [rows, q_heads, head_dim]
    kv_pages: jax.Array,  # [pages, page_size, 2 * kv_heads, head_dim]
    kv_lens: jax.Array,  # i32[seqs]
    page_indices: jax.Array,  # i32[seqs, pages_per_seq]
    cu_q_lens: jax.Array,  # i32[seqs + 1]
    num_seqs: jax.Array,  # i32[1]
    *,
    sm_scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    num_kv_pages_per_block: int,
    num_queries_per_block: int,
) -> jax.Array:
    """The in-tree `ragged_paged_attention`; rows past the last sequence are NaN."""
    kernel.static_validate_inputs(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
    )
    rows, q_heads, head_dim = q.shape
    num_pages, page_size, combined, _ = kv_pages.shape
    kernel.get_min_heads_per_blk(q_heads, combined, q.dtype, kv_pages.dtype)
    if head_dim != 128:
        raise ValueError(f"heads of {head_dim} elements are not one row of a register")
    group = 2 * q_heads // combined

    row = jnp.arange(rows)
    valid = jnp.arange(len(kv_lens)) < num_seqs[0]
    ends = jnp.where(valid, cu_q_lens[1:], rows + 1)
    seq = jnp.minimum(jnp.searchsorted(ends, row, side="right"), len(kv_lens) - 1)
    position = kv_lens[seq] - cu_q_lens[seq + 1] + row
    key = jnp.arange(page_indices.shape[1] * page_size)
    mine = key < kv_lens[seq][:, None]
    keep = mine & (key <= position[:, None])
    if sliding_window is not None:
        keep &= key > position[:, None] - sliding_window
    tables = jnp.where(_used(kv_pages, kv_lens, page_indices), page_indices, num_pages)
    cells = kv_pages.at[tables[seq]].get(mode="fill", fill_value=jnp.nan)
    cells = cells.reshape(rows, len(key), combined, head_dim)
    cells = jnp.where(mine[:, :, None, None], cells, 0).astype(jnp.float32)
    k, v = (jnp.repeat(cells[:, :, part::2], group, axis=2) for part in (0, 1))
    logits = sm_scale * jnp.einsum("rhd,rthd->rht", q.astype(jnp.float32), k)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits += jnp.where(keep[:, None], 0, kernel.DEFAULT_MASK_VALUE)
    out = jnp.einsum("rht,rthd->rhd", jax.nn.softmax(logits), v)
    fine = meets_contract(q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs)
    computed = fine & (row < cu_q_lens[num_seqs[0]])
    return jnp.where(computed[:, None, None], out, jnp.nan).astype(q.dtype)


def meets_contract(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
) -> jax.Array:  # bool[]
    """Whether each of the first `num_seqs` sequences, at least one, has queries, as many keys or
    more, and existing pages for them."""
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    exists = (page_indices >= 0) & (page_indices < kv_pages.shape[0])
    fine = (exists | ~_used(kv_pages, kv_lens, page_indices)).all(1)
    fine &= (q_lens >= 1) & (kv_lens >= q_lens)
    fine &= kv_lens <= page_indices.shape[1] * kv_pages.shape[1]
    valid = jnp.arange(len(kv_lens)) < num_seqs[0]
    some = (num_seqs[0] >= 1) & (num_seqs[0] <= len(kv_lens)) & (cu_q_lens[0] == 0)
    return some & (cu_q_lens[num_seqs[0]] <= len(q)) & jnp.all(fine | ~valid)


def _used(kv_pages: jax.Array, kv_lens: jax.Array, page_indices: jax.Array) -> jax.Array:
    """Entries of the tables that are read: those with keys.  Others may be any number."""
    return jnp.arange(page_indices.shape[1]) * kv_pages.shape[1] < kv_lens[:, None]

"""Which sequence a query row belongs to, and how many keys it sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_positions(
    num_rows: int,
    kv_lens: jax.Array,  # i32[seqs]
    cu_q_lens: jax.Array,  # i32[seqs + 1]
) -> tuple[jax.Array, jax.Array]:  # 2 x i32[rows]
    """Sequence of each row, and the keys it sees without a window: its position + 1.

    A row of no active sequence sees 0 keys, and its sequence is one that exists.
    """
    row = jnp.arange(num_rows, dtype=jnp.int32)
    seq = jnp.searchsorted(cu_q_lens[1:], row, side="right", method="compare_all").astype(jnp.int32)
    inside = seq < kv_lens.shape[0]
    seq = jnp.where(inside, seq, 0)
    seen = kv_lens[seq] - (cu_q_lens[seq + 1] - 1 - row)
    return seq, jnp.where(inside & (kv_lens[seq] > 0), jnp.maximum(seen, 0), 0)

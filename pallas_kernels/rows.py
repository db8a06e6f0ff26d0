"""What is known of single rows: their sequence, how many keys they see, their rotation."""

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


def rotate_half(
    x: jax.Array,  # [rows, heads, head_dim]
    cos: jax.Array,  # f32[rows, head_dim / 2]
    sin: jax.Array,  # f32[rows, head_dim / 2]
) -> jax.Array:  # f32[rows, heads, head_dim]
    """Rotate the first half of each head against its second (RoPE, arXiv:2104.09864)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    c, s = cos[:, None], sin[:, None]
    return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)

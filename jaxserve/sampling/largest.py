"""The largest logits of each row, exactly, equal ones in the order of their ids.

In two levels, over blocks of neighbouring ids: XLA's CPU backend vectorises the maxima of blocks,
where it runs a plain argmax or top-k over a vocabulary as a scalar loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

ARGMAX_BLOCK = 128
TOP_BLOCK = 64
"""Measured: an argmax of about as many blocks as a block has ids is fastest, while the `k` blocks
that a top-k looks into should be small (`benchmarks/sampler.py`)."""


def argmax(logits: jax.Array) -> jax.Array:  # f32[rows, vocab] -> i32[rows]
    """Lowest id of the largest logit of each row; the first NaN counts as the largest."""
    blocks = _blocks(logits, ARGMAX_BLOCK)
    best = jnp.argmax(blocks.max(-1), -1)
    inside = jnp.take_along_axis(blocks, best[:, None, None], 1)[:, 0]
    return (best * ARGMAX_BLOCK + jnp.argmax(inside, -1)).astype(jnp.int32)


def only_allowed(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Logits with minus infinity where a bit is not set.

    Args:
        logits: f32[rows, vocab].
        allowed: i32[rows, ceil(vocab / 32)], packed bits, id 0 the lowest of the first word.
    """
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    return jnp.where(bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] != 0, logits, -jnp.inf)


def top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The `k` largest logits of each row and their ids, largest first.

    Returns:
        f32[rows, k] and i32[rows, k]; -inf and 0 from the end of a vocabulary of less than `k`.
    """
    if k == 0 or k * TOP_BLOCK > logits.shape[1]:
        return _short_top_k(logits, k)
    best, inside = best_blocks(logits, k, TOP_BLOCK)
    inside = lax.optimization_barrier(inside.reshape(logits.shape[0], -1))
    values, index = lax.top_k(inside, k)
    block = jnp.take_along_axis(best, index // TOP_BLOCK, 1)
    return values, (block * TOP_BLOCK + index % TOP_BLOCK).astype(jnp.int32)


def best_blocks(logits: jax.Array, k: int, size: int) -> tuple[jax.Array, jax.Array]:
    """The `k` blocks of each row with the largest maxima: they hold the row's `k` largest logits.

    Args:
        logits: f32[rows, vocab], at least `k * size` of them.
        k: how many.
        size: of a block, in ids.

    Returns:
        Which blocks they are, i32[rows, k], rising; their logits, f32[rows, k, size].
    """
    blocks = _blocks(logits, size)
    # Without the barrier XLA computes the maxima anew in the loops of their users.
    _, best = lax.top_k(lax.optimization_barrier(blocks.max(-1)), k)
    best = jnp.sort(best, -1)  # ties go to the lowest id
    return best, jnp.take_along_axis(blocks, best[:, :, None], 1)


def _short_top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, ids = lax.top_k(logits, min(k, logits.shape[1]))
    short = k - values.shape[1]
    return (
        jnp.pad(values, ((0, 0), (0, short)), constant_values=-jnp.inf),
        jnp.pad(ids, ((0, 0), (0, short))),
    )


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """`[rows, vocab]` as `[rows, blocks, size]`, filled up with -inf."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=-jnp.inf)
    return padded.reshape(x.shape[0], -1, size)

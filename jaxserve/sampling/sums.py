"""Sums over a vocabulary whose order is part of the program, not of the compiler.

XLA adds a row in an order that may depend on how many rows there are.  Here every addition is
written down: halves are added to each other until one number is left.  So a row's sum has the same
bits in any batch, and a sum of non-negative numbers never shrinks when one of them grows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

STAGES = 3
"""How often a row's four quarters are added to each other first, each time in one loop."""

PARTS = 4**STAGES
"""Parts of a row that become one; measured, vectors of a few streams are fastest on a CPU."""


def aligned(x: jax.Array, fill: float) -> jax.Array:
    """`[rows, vocab]` filled up to a multiple of `PARTS`."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % PARTS)), constant_values=fill)


def columns(x: jax.Array) -> jax.Array:
    """`[rows, PARTS * n]` as `[rows, PARTS, n]`; column `i` holds indices `i`, `i + n`, ..."""
    return x.reshape(x.shape[0], PARTS, -1)


def column_sums(x: jax.Array) -> jax.Array:  # f32[rows, PARTS * n] -> f32[rows, n]
    """Sum of each column."""
    for _ in range(STAGES):
        parts = x.reshape(x.shape[0], 4, -1)
        x = (parts[:, 0] + parts[:, 2]) + (parts[:, 1] + parts[:, 3])
        # Here and below: without barriers XLA repeats these loops in each of the later ones.
        x = lax.optimization_barrier(x)
    return x


def row_sums(x: jax.Array) -> jax.Array:  # f32[rows, PARTS * n] -> f32[rows]
    """Sum of each row."""
    return heap(column_sums(x))[:, 1]


def heap(x: jax.Array) -> jax.Array:  # f32[rows, n] -> f32[rows, 2 * width]
    """Partial sums of each row, filled up to a power of two, `width`.

    Level `h`, for `h` in 1, 2, 4 ... `width`, lies at `h` to `2 * h - 1`: the sums of the indices
    that are equal modulo `h`.  Element `i` of it is the sum of `i` and `i + h` of level `2 * h`.
    """
    width = 1 << (x.shape[1] - 1).bit_length()
    levels = [jnp.pad(x, ((0, 0), (0, width - x.shape[1])))]
    while levels[-1].shape[1] > 1:
        half = levels[-1].shape[1] // 2
        levels.append(lax.optimization_barrier(levels[-1][:, :half] + levels[-1][:, half:]))
    return jnp.concatenate([jnp.zeros_like(levels[-1]), *reversed(levels)], 1)

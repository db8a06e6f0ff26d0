"""One index per row, drawn in proportion to its weights, from uniform numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.carry import INTS, Carry
from jaxserve.sampling.sums import column_sums, columns, heap


def inverse_cdf(
    weights: jax.Array,  # f32[rows, PARTS * n], not negative
    uniforms: jax.Array,  # f32[rows, 2], in [0, 1)
) -> tuple[jax.Array, jax.Array]:
    """Draw an index of each row.

    In two levels, a column and then an index within it, each with a uniform of its own, so that
    the resolution of float32 uniforms does not cut off the tail of a large vocabulary.

    Returns:
        The index, i32[rows], never one without weight unless the row has none at all, and the sum
        of the weights, f32[rows].
    """
    sums = heap(column_sums(weights))
    column = descend(sums, uniforms[:, 0])
    inside = jnp.take_along_axis(columns(weights), column[:, None, None], 2)[:, :, 0]
    part = descend(heap(inside), uniforms[:, 1])
    return part * columns(weights).shape[2] + column, sums[:, 1]


def descend(sums: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index of each row of a `heap`, by its partial sums from the root down.

    A branch without weight is never taken while the other has some, whatever the rounding.
    """
    sums = lax.optimization_barrier(sums)
    depth = (sums.shape[1] // 2).bit_length() - 1

    def level(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, rest = state
        size = jnp.left_shift(jnp.int32(1), i)
        first = jnp.take_along_axis(sums, 2 * size + index, 1)
        second = jnp.take_along_axis(sums, 3 * size + index, 1)
        other = (second > 0) & ((rest >= first) | (first <= 0))
        return jnp.where(other, index + size, index), jnp.where(other, rest - first, rest)

    start = (jnp.zeros((sums.shape[0], 1), jnp.int32), uniform[:, None] * sums[:, 1:2])
    index: jax.Array = lax.fori_loop(0, depth, level, start)[0]
    return index[:, 0]


def uniforms(carry: Carry, slots: jax.Array, positions: jax.Array, attempt: jax.Array) -> jax.Array:
    """Two numbers in [0, 1) per row, f32[rows, 2].

    A function of (seed, sample index, position, attempt) alone: threefry (Salmon et al., SC '11)
    over a key into which they are folded.
    """
    ints = carry.ints[slots]
    low, high = INTS.index("seed_low"), INTS.index("seed_high")

    def row(words: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        for number in (sample_index, position, attempt):
            key = jax.random.fold_in(key, number)
        return jax.random.uniform(key, (2,))

    words = lax.bitcast_convert_type(jnp.stack([ints[:, high], ints[:, low]], 1), jnp.uint32)
    return jax.vmap(row)(words, ints[:, INTS.index("sample_index")], positions)

"""Log-probabilities of tokens, as the model gave them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.largest import top_k
from jaxserve.sampling.sums import aligned, row_sums


def token_logprobs(
    logits: jax.Array,  # f32[rows, vocab]
    token: jax.Array,  # i32[rows]
    num_top: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probability and rank of each row's token, and its most likely tokens.

    Returns:
        f32[rows] and i32[rows], 1 for the most likely, of `token`; i32[rows, num_top] and
        f32[rows, num_top], the most likely ids, equal ones in their order, and theirs.
    """
    largest = lax.optimization_barrier(logits.max(-1, keepdims=True))
    mine = jnp.take_along_axis(logits, token[:, None], 1)
    values, ids = top_k(logits, num_top)
    logits = aligned(logits, -jnp.inf)
    normaliser = largest + jnp.log(row_sums(jnp.exp(logits - largest)))[:, None]
    rank = 1 + row_sums((logits > mine).astype(jnp.int32))
    return (mine - normaliser)[:, 0], rank, ids, values - normaliser


def no_logprobs(rows: int, num_top: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Zeros in the place of `token_logprobs`."""
    return (
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, num_top), jnp.int32),
        jnp.zeros((rows, num_top), jnp.float32),
    )

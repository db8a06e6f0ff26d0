"""Draws limited by min-p, top-k and top-p, exact over the whole vocabulary, without a sort.

The filters follow the usual order: min-p (arXiv:2407.01082), top-k, then top-p (arXiv:1904.09751)
over what is left.  The first two are thresholds, which remove weights.  The nucleus of top-p needs
no threshold: a token is in it if the tokens more likely than it hold less than `top_p` of the
mass, which one sum decides.  So tokens are drawn until one is in the nucleus, each from what is
more likely than the last that was not (rejection with a rising pivot, as in FlashInfer's
sorting-free sampling).  Most steps need one or two more passes over the vocabulary; each halves,
on average, the mass that is too much.

Tokens whose logits tie with the last kept one are kept.  Nothing here looks at two rows at once,
but for whether another pass is needed: a row's token does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.draw import inverse_cdf
from jaxserve.sampling.largest import best_blocks
from jaxserve.sampling.sums import aligned, row_sums

CANDIDATES = 64
"""A `top_k` up to this is looked for among as many blocks of logits, a larger one among all."""

BLOCK = 32
"""Logits in each of these blocks; measured (`benchmarks/sampler.py`)."""


class State(NamedTuple):
    """Of the loop of draws."""

    number: jax.Array  # i32[], of draws so far
    token: jax.Array  # i32[rows], the last one drawn that counts
    pending: jax.Array  # bool[rows], whether `token` may be outside the nucleus
    enough: jax.Array  # f32[rows], the nucleus's mass


def thresholds(
    logits: jax.Array,  # f32[rows, PARTS * n]
    top_k: jax.Array,  # i32[rows]
    limited: jax.Array,  # bool[rows], whose `top_k` is not off
) -> jax.Array:
    """The least logit that top-k leaves in each row, f32[rows], -inf where nothing is limited."""
    none = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)
    least: jax.Array = lax.cond(
        jnp.any(limited), lambda: _kth(logits, top_k, limited), lambda: none
    )
    return least


def kept_weights(
    logits: jax.Array,  # f32[rows, PARTS * n]
    temperature: jax.Array,  # f32[rows], positive
    threshold: jax.Array,  # f32[rows]
    min_p: jax.Array,  # f32[rows]
) -> jax.Array:
    """Unnormalised probabilities, the largest 1; zero for what min-p and top-k remove."""
    best = lax.optimization_barrier(logits.max(-1, keepdims=True))
    weights = jnp.exp((logits - best) * (1 / temperature)[:, None])
    kept = (weights >= min_p[:, None]) & (logits >= threshold[:, None])
    weights = jnp.where(kept, weights, 0.0)
    # The many passes over the weights read them; XLA would compute the exponentials in each.
    barred: jax.Array = lax.optimization_barrier(weights)
    return barred


def draw_from_nucleus(
    logits: jax.Array,  # f32[rows, PARTS * n]
    weights: jax.Array,  # f32[rows, PARTS * n], of the same order, but zero where removed
    top_p: jax.Array,  # f32[rows]
    limited: jax.Array,  # bool[rows], whose `top_p` is not off
    uniforms: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Draw the tokens, i32[rows], from weights limited by top-p.

    Args:
        logits: what decides which of two tokens is more likely.
        weights: unnormalised probabilities; the most likely token must have one.
        top_p: share of a row's mass that its nucleus must hold.
        limited: rows with a nucleus; each of the others takes the first draw.
        uniforms: f32[rows, 2] in [0, 1) for each attempt to draw.
    """
    rows = logits.shape[0]

    def attempt(state: State) -> State:
        number, token, pending, enough = state
        first = number == 0
        mine = jnp.take_along_axis(logits, token[:, None], 1)
        # One code for the first draw, from everything, and the others saves compiling it twice.
        likelier = jnp.where(logits > jnp.where(first, -jnp.inf, mine), weights, 0.0)
        another, mass = inverse_cdf(likelier, uniforms(number))
        # The most likely token, which has nothing above it, is in a nucleus of any size.
        outside = pending & (mass >= enough) & (mass > 0)
        return State(
            number + 1,
            jnp.where(first | outside, another, token),
            jnp.where(first, limited, outside),
            jnp.where(first, top_p * mass, enough),
        )

    start = State(
        jnp.int32(0),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, jnp.bool_),
        jnp.zeros(rows, jnp.float32),
    )
    last: State = lax.while_loop(
        lambda state: (state.number == 0) | jnp.any(state.pending), attempt, start
    )
    return last.token


def _kth(logits: jax.Array, top_k: jax.Array, limited: jax.Array) -> jax.Array:
    near = limited & (top_k <= CANDIDATES)
    far = limited & (top_k > CANDIDATES)
    none = jnp.full(logits.shape[0], -jnp.inf, jnp.float32)
    # The number is the same from either: the k-th largest is one of the row's own.
    from_candidates = kth_largest(_candidates(logits), top_k)
    from_all = lax.cond(jnp.any(far), lambda: kth_largest(logits, top_k), lambda: none)
    return jnp.where(near, from_candidates, jnp.where(far, from_all, -jnp.inf))


def _candidates(logits: jax.Array) -> jax.Array:  # -> f32[rows, PARTS * n]
    """Logits among which are the `CANDIDATES` largest of each row."""
    if logits.shape[1] <= CANDIDATES * BLOCK:
        return logits
    _, blocks = best_blocks(logits, CANDIDATES, BLOCK)
    return aligned(blocks.reshape(logits.shape[0], -1), -jnp.inf)


def kth_largest(x: jax.Array, k: jax.Array) -> jax.Array:  # f32[rows, PARTS * n], i32[rows]
    """The `k`-th largest of each row, f32[rows], by bisection over the floats' integer form."""
    ordered = lax.optimization_barrier(_ordered(x))

    def bit(i: jax.Array, found: jax.Array) -> jax.Array:
        higher = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        count = row_sums((ordered >= higher[:, None]).astype(jnp.int32))
        return jnp.where(count >= k, higher, found)

    found = lax.fori_loop(0, 32, bit, jnp.zeros(x.shape[0], jnp.uint32))
    bits = jnp.where(found >> 31 == 1, found ^ jnp.uint32(1 << 31), ~found)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _ordered(x: jax.Array) -> jax.Array:
    """Floats as unsigned integers of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

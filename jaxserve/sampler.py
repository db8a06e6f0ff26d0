"""From logits to tokens: every sampling feature as data of fixed shape.

One program serves every mixture of greedy and sampled rows.  What a row asks for lies in its
slot of the carry; a feature that no row of the step uses is skipped by a branch on the device,
never by another executable.

A row's token and log-probabilities are functions of its logits and its slot alone, bit by bit: they
do not depend on how many rows there are, nor on what the others ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.carry import ADJUSTS, DRAWS, FILTERS, FLOATS, INTS, LOGPROBS, MASKS, Carry
from jaxserve.sampling.adjust import adjust
from jaxserve.sampling.draw import uniforms
from jaxserve.sampling.filters import draw_from_nucleus, kept_weights, thresholds
from jaxserve.sampling.largest import argmax, only_allowed
from jaxserve.sampling.logprobs import no_logprobs, token_logprobs
from jaxserve.sampling.sums import aligned

Logits = Callable[[], jax.Array]
"""`() -> f32[rows, vocab]`."""

Greedy = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
"""`(allowed) -> (i32[rows], f32[rows])`: the lowest id of each row's largest logit among those that
are allowed, packed bits, and that logit, which is not finite if the row's are not usable."""


class Sampled(NamedTuple):
    """What one step reports of each sequence row."""

    token: jax.Array  # i32[rows]
    finite: jax.Array  # bool[rows], False if the model's logits are not usable
    logprob: jax.Array  # f32[rows], of `token`
    rank: jax.Array  # i32[rows], of `token`, 1 for the most likely
    top_ids: jax.Array  # i32[rows, n]
    top_logprobs: jax.Array  # f32[rows, n]


def sample(
    logits: Logits,
    greedy: Greedy,
    carry: Carry,
    slots: jax.Array,  # i32[rows]
    positions: jax.Array,  # i32[rows], of the tokens to sample
    active: jax.Array,  # bool[rows]
    num_top: int,
    masks: jax.Array | None = None,  # i32[rows, ceil(vocab / 32)]
) -> Sampled:
    """Choose one token per row as its slot's parameters say.

    Only one of `logits` and `greedy` is evaluated on the device: the logits never exist in a step
    all of whose rows are greedy.  Rows that are not active get arbitrary tokens and never widen
    the work of the step.  `masks` are packed bits of what constraints allow, all of them set
    for a row without; none are there in a step that knows of no constraints.  Log-probabilities
    are the model's own: before penalties, bias, temperature and filters.
    """
    flags = jnp.where(active, carry.ints[slots, INTS.index("flags")], 0)
    allowed = partial(_allowed, carry, slots, flags, masks)
    sampled: Sampled = lax.cond(
        jnp.any(flags & (ADJUSTS | DRAWS | LOGPROBS) != 0),
        lambda: _from_logits(logits(), carry, slots, positions, active, flags, allowed, num_top),
        lambda: _only_greedy(*greedy(allowed()), num_top),
    )
    return sampled


def _allowed(
    carry: Carry, slots: jax.Array, flags: jax.Array, masks: jax.Array | None
) -> jax.Array:
    """What each row may sample now, as packed bits."""
    allowed = carry.allowed[slots]
    if masks is not None:
        allowed &= masks
    return jnp.where(flags[:, None] & MASKS != 0, allowed, -1)


def _only_greedy(token: jax.Array, largest: jax.Array, num_top: int) -> Sampled:
    return Sampled(token, jnp.isfinite(largest), *no_logprobs(token.shape[0], num_top))


def _from_logits(
    logits: jax.Array,
    carry: Carry,
    slots: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    flags: jax.Array,
    allowed: Callable[[], jax.Array],
    num_top: int,
) -> Sampled:
    # Without the barriers XLA would compute the logits anew inside the loops of each branch.
    logits = lax.optimization_barrier(logits)
    adjusted = lax.cond(
        jnp.any(flags & ADJUSTS != 0),
        lambda: adjust(logits, carry, slots, positions),
        lambda: logits,
    )
    adjusted = lax.cond(
        jnp.any(flags & MASKS != 0),
        lambda: only_allowed(adjusted, allowed()),
        lambda: adjusted,
    )
    samples = flags & DRAWS != 0
    nothing = jnp.zeros(logits.shape[0], jnp.int32)
    greedy = lax.cond(jnp.any(active & ~samples), lambda: argmax(adjusted), lambda: nothing)
    drawn = lax.cond(
        jnp.any(samples),
        lambda: _draw(adjusted, carry, slots, positions, flags),
        lambda: nothing,
    )
    token = jnp.where(samples, drawn, greedy)
    logprobs = lax.cond(
        jnp.any(flags & LOGPROBS != 0),
        lambda: token_logprobs(logits, token, num_top),
        lambda: no_logprobs(logits.shape[0], num_top),
    )
    return Sampled(token, jnp.isfinite(logits.max(-1)), *logprobs)


def _draw(
    logits: jax.Array, carry: Carry, slots: jax.Array, positions: jax.Array, flags: jax.Array
) -> jax.Array:
    vocab = logits.shape[1]
    samples, filtered = flags & DRAWS != 0, flags & FILTERS != 0
    top_k = carry.ints[slots, INTS.index("top_k")]
    temperature, top_p, min_p = (
        carry.floats[slots, FLOATS.index(name)] for name in ("temperature", "top_p", "min_p")
    )
    # Rows that do not sample divide by one: their zero temperature must not make a NaN.
    temperature = jnp.where(samples, temperature, 1.0)
    logits = aligned(logits, -jnp.inf)
    threshold = thresholds(logits, top_k, filtered & (top_k < vocab))
    return draw_from_nucleus(
        logits,
        kept_weights(logits, temperature, threshold, min_p),
        top_p,
        filtered & (top_p < 1),
        lambda attempt: uniforms(carry, slots, positions, attempt),
    )

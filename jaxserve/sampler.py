"""From logits to tokens: every sampling feature as data of fixed shape.

One program serves every mixture of greedy and sampled rows.  What a row asks for lies in its
slot of the carry; a feature that no row of the step uses is skipped by a branch on the device,
never by another executable.

Filters follow the usual order: temperature, min-p (arXiv:2407.01082), top-k, then top-p
(arXiv:1904.09751) over what is left.  Thresholds are found exactly by bisection over the
order-preserving integer form of the floats: no sort of the vocabulary.  Tokens whose logits tie
with the last kept one are kept.

The random bits of a token are a function of (seed, sample index, position) alone (threefry,
Salmon et al., SC '11), so a seeded request does not depend on its slot, its neighbours or the
schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.carry import ADJUSTS, FILTERS, FLOATS, INTS, LOGPROBS, SAMPLES, Carry

BLOCK = 64
"""Logits are looked at in blocks of this many: XLA vectorises the inner reduction."""


class Sampled(NamedTuple):
    """What one step reports of each sequence row."""

    token: jax.Array  # i32[rows]
    finite: jax.Array  # bool[rows], False if the model's logits are not usable
    logprob: jax.Array  # f32[rows], of `token`
    rank: jax.Array  # i32[rows], of `token`, 1 for the most likely
    top_ids: jax.Array  # i32[rows, n]
    top_logprobs: jax.Array  # f32[rows, n]


def sample(
    logits: jax.Array,  # f32[rows, vocab]
    carry: Carry,
    slots: jax.Array,  # i32[rows]
    positions: jax.Array,  # i32[rows], of the tokens to sample
    active: jax.Array,  # bool[rows]
    num_top: int,
) -> Sampled:
    """Choose one token per row as its slot's parameters say.

    Rows that are not active get arbitrary tokens and never widen the work of the step.
    Log-probabilities are the model's own: before penalties, bias, temperature and filters.
    """
    flags = jnp.where(active, carry.ints[slots, INTS.index("flags")], 0)
    largest = logits.max(-1)
    finite = jnp.isfinite(largest)
    token = lax.cond(
        jnp.any(flags & (ADJUSTS | SAMPLES) != 0),
        lambda: _choose(logits, carry, slots, positions, flags),
        lambda: argmax(logits),
    )
    logprobs = lax.cond(
        jnp.any(flags & LOGPROBS != 0),
        lambda: token_logprobs(logits, token, num_top),
        lambda: _no_logprobs(logits.shape[0], num_top),
    )
    return Sampled(token, finite, *logprobs)


def argmax(logits: jax.Array) -> jax.Array:
    """Lowest id of the largest logit of each row.

    In two levels: XLA's CPU backend runs a plain argmax over the vocabulary as a scalar loop.
    """
    blocks = _blocks(logits)
    best = jnp.argmax(blocks.max(-1), -1)
    inside = jnp.take_along_axis(blocks, best[:, None, None], 1)[:, 0]
    return (best * BLOCK + jnp.argmax(inside, -1)).astype(jnp.int32)


def token_logprobs(
    logits: jax.Array, token: jax.Array, num_top: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Log-probability and rank of `token`, and the `num_top` most likely ids with theirs."""
    # The barrier keeps XLA from fusing the reductions below into one scalar loop.
    logits = lax.optimization_barrier(logits)
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    mine = jnp.take_along_axis(logits, token[:, None], 1)
    rank = 1 + jnp.sum(logits > mine, -1, dtype=jnp.int32)
    values, ids = top_k(logits, num_top)
    return (mine - normaliser)[:, 0], rank, ids, values - normaliser


def top_k(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The `k` largest logits of each row and their ids, largest first.

    Exact: the `k` blocks with the largest maxima hold the `k` largest logits.
    """
    blocks = _blocks(logits)
    if k == 0 or k > blocks.shape[1]:
        padded = blocks.reshape(logits.shape[0], -1)
        values, ids = lax.top_k(padded, min(k, logits.shape[1]))
        short = k - values.shape[1]
        return (
            jnp.pad(values, ((0, 0), (0, short)), constant_values=-jnp.inf),
            jnp.pad(ids, ((0, 0), (0, short))),
        )
    _, best = lax.top_k(blocks.max(-1), k)
    best = jnp.sort(best, -1)  # ties go to the lowest id
    candidates = jnp.take_along_axis(blocks, best[:, :, None], 1).reshape(logits.shape[0], -1)
    values, index = lax.top_k(candidates, k)
    block = jnp.take_along_axis(best, index // BLOCK, 1)
    return values, (block * BLOCK + index % BLOCK).astype(jnp.int32)


def _no_logprobs(rows: int, num_top: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    return (
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, num_top), jnp.int32),
        jnp.zeros((rows, num_top), jnp.float32),
    )


def _choose(
    logits: jax.Array, carry: Carry, slots: jax.Array, positions: jax.Array, flags: jax.Array
) -> jax.Array:
    logits = lax.cond(
        jnp.any(flags & ADJUSTS != 0),
        lambda: adjust(logits, carry, slots, positions),
        lambda: logits,
    )
    greedy = argmax(logits)
    drawn = lax.cond(
        jnp.any(flags & SAMPLES != 0),
        lambda: _draw(logits, carry, slots, positions, flags),
        lambda: greedy,
    )
    return jnp.where(flags & SAMPLES != 0, drawn, greedy)


def adjust(logits: jax.Array, carry: Carry, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """Logits with penalties, bias, allowed ids and held-back end tokens applied, row by row.

    The repetition penalty (arXiv:1909.05858) divides positive and multiplies negative logits of
    every token of prompt or output; frequency and presence penalties subtract for output tokens
    only.
    """
    vocab = logits.shape[1]
    floats = {name: carry.floats[slots, i][:, None] for i, name in enumerate(FLOATS)}
    counts = carry.output_counts[slots]
    repeated = carry.in_prompt[slots] | (counts > 0)
    factor = jnp.where(repeated, floats["repetition"], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - floats["frequency"] * counts.astype(jnp.float32)
    logits = logits - jnp.where(counts > 0, floats["presence"], 0.0)

    row = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[row, carry.bias_ids[slots]].add(carry.bias_values[slots], mode="drop")
    words = carry.allowed[slots]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, :vocab] != 0
    logits = jnp.where(allowed, logits, -jnp.inf)
    early = positions < carry.ints[slots, INTS.index("min_position")]
    held_back = jnp.where(early[:, None], carry.end_ids[slots], vocab)
    return logits.at[row, held_back].set(-jnp.inf, mode="drop")


def _draw(
    logits: jax.Array, carry: Carry, slots: jax.Array, positions: jax.Array, flags: jax.Array
) -> jax.Array:
    temperature = carry.floats[slots, FLOATS.index("temperature")]
    # Rows that do not sample divide by one: their zero temperature must not make a NaN.
    temperature = jnp.where(flags & SAMPLES != 0, temperature, 1.0)[:, None]
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature
    scaled = lax.optimization_barrier(scaled)
    weights = lax.cond(
        jnp.any(flags & FILTERS != 0),
        lambda: filtered_weights(
            scaled,
            top_k=carry.ints[slots, INTS.index("top_k")],
            top_p=carry.floats[slots, FLOATS.index("top_p")],
            min_p=carry.floats[slots, FLOATS.index("min_p")],
        ),
        lambda: jnp.exp(scaled),
    )
    return inverse_cdf(weights, _uniforms(carry, slots, positions))


def filtered_weights(
    scaled: jax.Array,  # f32[rows, vocab], largest 0
    *,
    top_k: jax.Array,  # i32[rows], vocab for off
    top_p: jax.Array,  # f32[rows], 1 for off
    min_p: jax.Array,  # f32[rows], 0 for off
) -> jax.Array:
    """Unnormalised probabilities, zero for the tokens that the filters remove."""
    weights = jnp.exp(scaled)
    weights = jnp.where(weights >= min_p[:, None], weights, 0.0)
    order = _ordered(scaled)

    def at_least(threshold: jax.Array) -> jax.Array:
        return order >= threshold[:, None]

    kth = _largest_threshold(lambda t: jnp.sum(at_least(t), -1, dtype=jnp.int32) >= top_k, scaled)
    weights = jnp.where(at_least(kth), weights, 0.0)
    mass = top_p * weights.sum(-1)
    nucleus = _largest_threshold(
        lambda t: jnp.sum(jnp.where(at_least(t), weights, 0.0), -1) >= mass, scaled
    )
    # A tiny top_p may round the mass to zero, which no tokens at all would reach.
    nucleus = jnp.where(top_p < 1, jnp.minimum(nucleus, order.max(-1)), 0)
    return jnp.where(at_least(nucleus), weights, 0.0)


def _ordered(x: jax.Array) -> jax.Array:
    """Floats as unsigned integers of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(holds: Callable[[jax.Array], jax.Array], like: jax.Array) -> jax.Array:
    """Largest u32 threshold of each row for which `holds`, a decreasing predicate, is true."""

    def bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(higher), higher, threshold)

    found: jax.Array = lax.fori_loop(0, 32, bit, jnp.zeros(like.shape[0], jnp.uint32))
    return found


def inverse_cdf(
    weights: jax.Array,  # f32[rows, vocab], not all zero in a row
    uniforms: jax.Array,  # f32[rows, 2], in [0, 1)
) -> jax.Array:
    """One index per row, drawn in proportion to its weights.

    In two levels, a block and then an index within it, each with a uniform of its own, so that
    the resolution of float32 uniforms does not cut off the tail of a large vocabulary.
    """
    blocks = _blocks(weights, fill=0.0)
    block = _first_above(blocks.sum(-1), uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    return (block * BLOCK + _first_above(inside, uniforms[:, 1])).astype(jnp.int32)


def _first_above(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """First index whose cumulative weight exceeds `uniform` of the total.

    Only indices of positive weight qualify, and the last of them stands in if rounding leaves
    none: a removed token can never be drawn.
    """
    cumulative = jnp.cumsum(weights, -1)
    positive = weights > 0
    hit = positive & (cumulative > uniform[:, None] * cumulative[:, -1:])
    last = weights.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], -1)
    return jnp.where(hit.any(-1), jnp.argmax(hit, -1), last)


def _uniforms(carry: Carry, slots: jax.Array, positions: jax.Array) -> jax.Array:
    ints = carry.ints[slots]
    low, high = INTS.index("seed_low"), INTS.index("seed_high")

    def row(words: jax.Array, sample_index: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, sample_index), position)
        return jax.random.uniform(key, (2,))

    words = lax.bitcast_convert_type(jnp.stack([ints[:, high], ints[:, low]], 1), jnp.uint32)
    return jax.vmap(row)(words, ints[:, INTS.index("sample_index")], positions)


def _blocks(x: jax.Array, fill: float = -jnp.inf) -> jax.Array:
    """`[rows, vocab]` as `[rows, blocks, BLOCK]`, filled up at the end."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)), constant_values=fill)
    return padded.reshape(x.shape[0], -1, BLOCK)

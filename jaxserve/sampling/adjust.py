"""Penalties, bias, held-back end tokens, and the ids that are allowed at all."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.carry import FLOATS, INTS, Carry


def adjust(logits: jax.Array, carry: Carry, slots: jax.Array, positions: jax.Array) -> jax.Array:
    """Logits with penalties, bias and held-back end tokens applied, row by row.

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
    early = positions < carry.ints[slots, INTS.index("min_position")]
    held_back = jnp.where(early[:, None], carry.end_ids[slots], vocab)
    return logits.at[row, held_back].set(-jnp.inf, mode="drop")


def mask(logits: jax.Array, carry: Carry, slots: jax.Array) -> jax.Array:
    """Logits with minus infinity for the ids that a row's slot does not allow."""
    words = carry.allowed[slots]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed, logits, -jnp.inf)

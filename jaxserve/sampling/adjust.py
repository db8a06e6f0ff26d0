"""Penalties, bias and held-back end tokens."""

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

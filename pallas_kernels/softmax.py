"""The running softmax of the kernels, in base 2, and how partial ones join.

A state stands for some keys of a row: the sum of their weighted values, the largest logit and the
sum of their weights, all f32 (FlashAttention, arXiv:2205.14135).  Logits are in base 2: GPUs have
an instruction for powers of two.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASK = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Logit of a masked key: finite, so that a row without keys has weight 0 and not NaN."""
LOG2E = math.log2(math.e)
"""Factor from natural logits to logits in base 2."""


class State(NamedTuple):
    """Rows of a softmax over the keys seen so far."""

    total: jax.Array  # f32[..., lanes]
    largest: jax.Array  # f32[...]
    weight: jax.Array  # f32[...]


def no_keys(shape: tuple[int, ...], lanes: int) -> State:
    """The state of rows that have seen nothing."""
    return State(
        jnp.zeros((*shape, lanes), jnp.float32),
        jnp.full(shape, MASK, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def rescaled(state: State, largest: jax.Array) -> State:
    """The same state relative to a logit at least as large."""
    shrink = jnp.exp2(state.largest - largest)
    return State(state.total * shrink[..., None], largest, state.weight * shrink)


def with_sink(state: State, sink: jax.Array) -> State:
    """One more logit, natural, of weight but no value (arXiv:2309.17453)."""
    sink = sink * LOG2E
    state = rescaled(state, jnp.maximum(state.largest, sink))
    return state._replace(weight=state.weight + jnp.exp2(sink - state.largest))


def attention(state: State) -> jax.Array:
    """The weighted mean; exactly zero for rows that have seen nothing."""
    return state.total * (1 / jnp.where(state.weight > 0, state.weight, 1.0))[..., None]

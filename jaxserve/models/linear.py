"""The one matrix product of the models: the seam where a backend may own its weight layout."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax


def exact(dtype: jnp.dtype) -> lax.Precision | None:
    """Precision of products: float32 means float32 on every backend, not TF32 or bfloat16."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(x: jax.Array, weight: jax.Array, *, contract: int = 1) -> jax.Array:
    """`out[r, n...] = sum_k x[r, k...] weight[n..., k...]`, accumulated and returned in float32.

    Weights keep their input axes last, as checkpoints store them.  XLA's CPU backend packs the
    weight on every call, and packing rows is its cheaper form; float32 results keep it on the
    matrix units, where bfloat16 results would leave them.  Both sides are flattened to matrices
    first: that costs nothing, while XLA copies a weight of more axes into another order before
    every product.

    Args:
        x: `[rows, k...]`, in the type of the weight.
        weight: `[n..., k...]`; if it is split over devices, by its first axis or by the first
            of its inputs, so that the flattened axes can be split the same way.
        contract: how many trailing axes are inputs.
    """
    features = weight.shape[: weight.ndim - contract]
    inputs = math.prod(weight.shape[weight.ndim - contract :])
    out = lax.dot_general(
        x.reshape(x.shape[0], inputs),
        weight.reshape(-1, inputs),
        (((1,), (1,)), ((), ())),
        precision=exact(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(x.shape[0], *features)

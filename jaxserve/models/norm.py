"""RMS normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, gain: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * gain` over the last axis, in float32 (arXiv:1910.07467)."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + eps) * gain.astype(jnp.float32)

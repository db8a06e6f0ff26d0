"""Eight-bit keys and values: one scale per token and head, the same formula everywhere.

Symmetric, round to nearest, no zero point.  The kernels, the XLA path and the tests share these
functions, so that a cell has the same bits whoever wrote it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

INT8 = np.dtype(np.int8)
FP8 = np.dtype(jnp.float8_e4m3fn)
CELL_DTYPES = {"int8": INT8, "fp8": FP8}
"""Types of quantised cells by their usual names."""
LARGEST = {INT8: 127.0, FP8: 448.0}
"""Largest magnitude of each cell type."""
_LEAST_SCALE = 1e-8
"""Scale of a vector of zeros: nothing divides by zero."""


def scale_of(largest: jax.Array, dtype: np.dtype) -> jax.Array:
    """f32 scale for vectors whose largest magnitude is `largest`.

    A product and no quotient, into which compilers turn a constant divisor anyway.
    """
    return jnp.maximum(largest * (1 / LARGEST[dtype]), _LEAST_SCALE)


def to_cells(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x / scale` in the cell type; both f32, `scale` broadcast by the caller.

    By the reciprocal, into which compilers turn a common divisor anyway.
    """
    scaled = x * (1 / scale)
    if dtype == INT8:
        scaled = jnp.floor(scaled + 0.5)
    return jnp.clip(scaled, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)


def quantize(
    x: jax.Array,  # [..., head_dim]
    dtype: np.dtype,
) -> tuple[jax.Array, jax.Array]:  # dtype[..., head_dim], f32[...]
    """Cells and scales of vectors; `cells * scale` gives them back to half a step."""
    x = x.astype(jnp.float32)
    scale = scale_of(jnp.abs(x).max(-1), dtype)
    return to_cells(x, scale[..., None], dtype), scale

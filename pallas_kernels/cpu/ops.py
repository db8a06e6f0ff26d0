"""The kernels as functions of JAX arrays.

Weights are bfloat16 `[panels, steps, 32, 2]` of `packing.pack`, or 8 bits with scales of groups,
`u8[panels, groups, 1088]` of `packing.pack_groups`, each rounded to bfloat16 on its way into the
product.  A result is a function of its row: no other row can change a bit of it.

`used`, i32[], is how many rows are wanted: what is returned for the rows after them is anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.library import target


def linear(
    kernels: str,
    x: jax.Array,  # bf16[rows, k]
    used: jax.Array,
    weight: jax.Array,
    outputs: int,
) -> jax.Array:  # f32[rows, outputs]
    """`x @ weight.T`, accumulated in float32."""
    out = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)
    rows: jax.Array = _call(kernels, "linear", out)(x, used, weight)
    return rows


def linear_add(
    kernels: str,
    x: jax.Array,  # bf16[rows, k]
    used: jax.Array,
    weight: jax.Array,
    residual: jax.Array,  # f32[rows, outputs]
) -> jax.Array:  # f32[rows, outputs]
    """`residual + x @ weight.T`."""
    out = jax.ShapeDtypeStruct(residual.shape, jnp.float32)
    rows: jax.Array = _call(kernels, "linear_add", out)(x, used, weight, residual)
    return rows


def norm_linear(
    kernels: str,
    x: jax.Array,  # f32[rows, k]
    used: jax.Array,
    gain: jax.Array,  # bf16[k]
    eps: float,
    weight: jax.Array,
    outputs: int,
) -> jax.Array:  # f32[rows, outputs]
    """`rms_norm(x) * gain`, rounded to the weights' type, times the weights."""
    out = jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32)
    rows: jax.Array = _call(kernels, "norm_linear", out)(x, used, gain, weight, eps=np.float32(eps))
    return rows


def norm_swiglu(
    kernels: str,
    x: jax.Array,  # f32[rows, k]
    used: jax.Array,
    gain: jax.Array,  # bf16[k]
    eps: float,
    weight: jax.Array,  # gates and ups as `packing.interleave` orders them
    width: int,
) -> jax.Array:  # bf16[rows, width]
    """`silu(gate) * up` of `norm_linear`'s result (SwiGLU, arXiv:2002.05202)."""
    out = jax.ShapeDtypeStruct((x.shape[0], width), jnp.bfloat16)
    rows: jax.Array = _call(kernels, "norm_swiglu", out)(x, used, gain, weight, eps=np.float32(eps))
    return rows


def norm_argmax(
    kernels: str,
    x: jax.Array,  # f32[rows, k]
    used: jax.Array,
    gain: jax.Array,  # bf16[k]
    eps: float,
    weight: jax.Array,
    outputs: int,
    allowed: jax.Array | None = None,  # i32[rows, ceil(outputs / 32)]
) -> tuple[jax.Array, jax.Array]:  # i32[rows], f32[rows]
    """Lowest output of the largest value of `norm_linear`, and the value; no logits are written.

    The value is NaN if any of the row's is NaN or infinite.  `allowed` are packed bits: only the
    outputs whose bits are set count, and the value is minus infinity if there are none.
    """
    rows = x.shape[0]
    if allowed is None:
        allowed = jnp.zeros((rows, 0), jnp.int32)
    out = (
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    )
    token, most = _call(kernels, "norm_argmax", out)(
        x, used, gain, weight, allowed, eps=np.float32(eps), outputs=np.int32(outputs)
    )
    return token, most


def weight_rows(
    kernels: str,
    tokens: jax.Array,  # i32[rows]
    weight: jax.Array,
    outputs: int,
    inputs: int,
) -> jax.Array:  # f32[rows, inputs]
    """Rows of `[outputs, inputs]` weights, which a head and an embedding may share."""
    out = jax.ShapeDtypeStruct((tokens.shape[0], inputs), jnp.float32)
    call = _call(kernels, "weight_rows", out)
    rows: jax.Array = call(tokens, weight, outputs=np.int32(outputs))
    return rows


def _call(kernels: str, operation: str, out: Any) -> Callable[..., Any]:
    call: Callable[..., Any] = jax.ffi.ffi_call(target(kernels, operation), out)
    return call

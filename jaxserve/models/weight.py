"""A weight matrix as the model uses it: the seam where a backend owns its layout.

The model asks for products, not for elements.  A plain array answers through XLA; a form that was
made for a backend, packed or quantised, brings its own arithmetic by overriding `linear` and
whatever else it can do in one go.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.models.linear import linear
from jaxserve.models.norm import rms_norm
from jaxserve.sampling.largest import argmax, only_allowed

Used = jax.Array | None


class Weight:
    """Weights `[n..., k...]`: what they compute of rows, each row by itself.

    `used`, i32[] or None for all, is how many rows are wanted.  The results of the rows after
    them may be anything: a backend that can saves their work.
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the rows it takes, and of the model's activations."""
        raise NotImplementedError

    def linear(
        self, x: jax.Array, used: Used = None
    ) -> jax.Array:  # [rows, k...] -> f32[rows, n...]
        """`out[r, n...] = sum_k x[r, k...] weight[n..., k...]`, accumulated in float32."""
        raise NotImplementedError

    def rows(self, numbers: jax.Array) -> jax.Array:  # i32[rows] -> f32[rows, k]
        """Rows of the weights themselves; numbers out of range are clipped."""
        raise NotImplementedError

    def linear_add(self, x: jax.Array, residual: jax.Array, used: Used = None) -> jax.Array:
        """`residual + linear(x)`, in float32."""
        return residual + self.linear(x, used)

    def norm_linear(
        self, x: jax.Array, gain: jax.Array, eps: float, used: Used = None
    ) -> jax.Array:
        """`linear(rms_norm(x))` of float32 rows."""
        return self.linear(rms_norm(x, gain, eps).astype(self.dtype), used)

    def norm_swiglu(
        self, x: jax.Array, gain: jax.Array, eps: float, used: Used = None
    ) -> jax.Array:
        """`silu(gate) * up` of weights `[f, 2, k]`: gate and up projection of `rms_norm(x)`.

        SwiGLU (arXiv:2002.05202), as `[rows, f]` of `dtype`.
        """
        gate_up = self.norm_linear(x, gain, eps, used)
        return (jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1]).astype(self.dtype)

    def norm_argmax(
        self,
        x: jax.Array,
        gain: jax.Array,
        eps: float,
        used: Used = None,
        allowed: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:  # i32[rows], f32[rows]
        """The largest of `norm_linear(x)` and the lowest place that has it, per row.

        Only places count whose bits are set in `allowed`, i32[rows, ceil(n / 32)], if it is given.
        The value is not finite if the row is of no use.
        """
        logits = self.norm_linear(x, gain, eps, used)
        if allowed is not None:
            all_are = jnp.all(allowed == -1)
            logits = lax.cond(all_are, lambda: logits, lambda: only_allowed(logits, allowed))
        return argmax(logits), logits.max(-1)


class DenseWeight(Weight):
    """A canonical array, multiplied by XLA; differentiable."""

    def __init__(self, array: jax.Array, inputs: int = 1) -> None:
        """View `array`, whose last `inputs` axes are inputs."""
        self.array = array
        self.inputs = inputs

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the array."""
        return np.dtype(self.array.dtype)

    def linear(self, x: jax.Array, used: Used = None) -> jax.Array:
        """See `jaxserve.models.linear`."""
        return linear(x, self.array, contract=self.inputs)

    def rows(self, numbers: jax.Array) -> jax.Array:
        """A gather."""
        return self.array.at[numbers].get(mode="clip").astype(jnp.float32)


def as_weight(value: Any, inputs: int = 1) -> Weight:
    """A leaf of the weight tree as a `Weight`; `inputs` is how many trailing axes are inputs."""
    return value if isinstance(value, Weight) else DenseWeight(value, inputs)

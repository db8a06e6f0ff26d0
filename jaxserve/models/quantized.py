"""8-bit weights multiplied by XLA, for every backend that has no kernels of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.models.linear import linear
from jaxserve.models.weight import Used, Weight
from jaxserve.quantization import GROUP


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale"],
    meta_fields=["features", "inputs"],
)
@dataclass(frozen=True)
class QuantizedWeight(Weight):
    """Weights `[features..., inputs...]` as codes and the scales of groups of inputs.

    Products take the weights rounded to the type of the rows, as the CPU kernels do.
    """

    codes: Any
    """int8[n, k]."""
    scale: Any
    """bf16[n, groups]; see `jaxserve.quantization`."""
    features: tuple[int, ...]
    inputs: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the scales."""
        dtype: np.dtype[Any] = np.dtype(self.scale.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def linear(self, x: jax.Array, used: Used = None) -> jax.Array:
        """`x` times the weights, which are widened on the way."""
        flat = x.reshape(x.shape[0], math.prod(self.inputs))
        weight = _widened(self.codes, self.scale).astype(self.dtype)
        return linear(flat, weight).reshape(-1, *self.features)

    def rows(self, numbers: jax.Array) -> jax.Array:
        """A gather of codes and scales."""
        codes, scale = (x.at[numbers].get(mode="clip") for x in (self.codes, self.scale))
        kept = jnp.finfo(self.dtype)  # type: ignore[no-untyped-call]
        # XLA may leave out a conversion to a narrower type and back.
        return lax.reduce_precision(_widened(codes, scale), kept.nexp, kept.nmant)


def _widened(codes: jax.Array, scale: jax.Array) -> jax.Array:  # f32[n, k]
    each = jnp.repeat(scale.astype(jnp.float32), GROUP, axis=1)[:, : codes.shape[1]]
    return codes.astype(jnp.float32) * each

"""Weights packed for the CPU kernels, and the packing of a canonical leaf."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxserve.models.weight import Used, Weight
from jaxserve.quantization import dequantize, quantize
from pallas_kernels.cpu import ops, packing

_BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["data"],
    meta_fields=["kernels", "features", "inputs", "gated"],
)
@dataclass(frozen=True)
class PackedWeight(Weight):
    """Weights `[features..., inputs...]` in the panels of `pallas_kernels.cpu.packing`."""

    data: Any
    """bf16[panels, steps, 32, 2], or with 8 bits u8[panels, groups, 1088]."""
    kernels: str
    """Instruction set of the kernels that read it."""
    features: tuple[int, ...]
    inputs: tuple[int, ...]
    gated: bool
    """Gates and ups are interleaved for `norm_swiglu`: the only product it has."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Rows are bfloat16 whatever the weights are."""
        return _BF16

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def _outputs(self) -> int:
        return math.prod(self.features)

    def linear(self, x: jax.Array, used: Used = None) -> jax.Array:
        """One kernel."""
        flat = x.reshape(x.shape[0], -1)
        out = ops.linear(self.kernels, flat, _rows(flat, used), self.data, self._outputs)
        return out.reshape(-1, *self.features)

    def linear_add(self, x: jax.Array, residual: jax.Array, used: Used = None) -> jax.Array:
        """One kernel."""
        flat = x.reshape(x.shape[0], -1)
        return ops.linear_add(self.kernels, flat, _rows(flat, used), self.data, residual)

    def norm_linear(
        self, x: jax.Array, gain: jax.Array, eps: float, used: Used = None
    ) -> jax.Array:
        """One kernel."""
        out = ops.norm_linear(self.kernels, x, _rows(x, used), gain, eps, self.data, self._outputs)
        return out.reshape(-1, *self.features)

    def norm_swiglu(
        self, x: jax.Array, gain: jax.Array, eps: float, used: Used = None
    ) -> jax.Array:
        """One kernel."""
        width = self.features[0]
        return ops.norm_swiglu(self.kernels, x, _rows(x, used), gain, eps, self.data, width)

    def norm_argmax(
        self,
        x: jax.Array,
        gain: jax.Array,
        eps: float,
        used: Used = None,
        allowed: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """One kernel, which writes no logits."""
        rows, outputs = _rows(x, used), self._outputs
        return ops.norm_argmax(self.kernels, x, rows, gain, eps, self.data, outputs, allowed)

    def rows(self, numbers: jax.Array) -> jax.Array:
        """One kernel: a packed head is its own embedding."""
        (outputs,), (inputs,) = self.features, self.inputs
        return ops.weight_rows(self.kernels, numbers, self.data, outputs, inputs)


def _rows(x: jax.Array, used: Used) -> jax.Array:
    return jnp.int32(x.shape[0]) if used is None else used


def pack(
    weight: npt.NDArray[Any],
    kernels: str,
    *,
    inputs: int = 1,
    gated: bool = False,
    quantized: bool = False,
) -> PackedWeight:
    """Pack `[features..., inputs...]`, whose last `inputs` axes are inputs.

    Args:
        weight: bfloat16.
        kernels: instruction set that will read it.
        inputs: how many trailing axes are inputs.
        gated: it is `[f, 2, k]`, gate and up.
        quantized: to 8 bits, in groups.
    """
    features, columns = weight.shape[: weight.ndim - inputs], weight.shape[weight.ndim - inputs :]
    rows = weight.reshape(math.prod(features), -1)
    if gated:
        rows = packing.interleave(weight.reshape(*features, -1))
    data = packing.pack_groups(*quantize(rows)) if quantized else packing.pack(rows)
    return PackedWeight(data, kernels, features, columns, gated)


def unpack(packed: PackedWeight) -> npt.NDArray[Any]:
    """The canonical array, of host arrays: what was packed, or what its 8 bits stand for."""
    data = np.asarray(packed.data)
    outputs = data.shape[0] * packing.PANEL if packed.gated else math.prod(packed.features)
    inputs = math.prod(packed.inputs)
    if data.ndim == 3:
        rows = dequantize(*packing.unpack_groups(data, outputs, inputs, _BF16))
    else:
        rows = packing.unpack(data, outputs, inputs)
    if packed.gated:
        rows = packing.separate(rows, packed.features[0])
    return rows.reshape(*packed.features, *packed.inputs)

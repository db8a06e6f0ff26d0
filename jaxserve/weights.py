"""How weights are laid out while they are served, as opposed to how users see them.

Users see the canonical tree of plain arrays: it is what checkpoints hold and what gradients and
weight updates are made of.  A backend may want its matrices otherwise; a `WeightLayout` goes back
and forth, leaf by leaf, on the host and exactly, as far as the layout keeps every bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxserve.config import EngineConfig
from jaxserve.models.llama import Params
from jaxserve.models.packed import PackedWeight, pack, unpack
from jaxserve.models.quantized import QuantizedWeight
from jaxserve.quantization import dequantize, quantize
from pallas_kernels import cpu

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
TreePath = tuple[Any, ...]

_PACKED_INPUTS = {"embed": 1, "head": 1, "qkv": 1, "out": 3, "gate_up": 1, "down": 1}
"""Matrices of the canonical tree by their name, and how many of their axes are inputs."""


class WeightLayout:
    """The canonical tree as it is, and the base of other layouts."""

    name = "canonical"
    """Part of the keys of cached files: it changes whenever the bytes of a leaf do."""

    def pack(self, path: TreePath, array: Array) -> Any:
        """A served leaf, of host arrays, from the canonical one at `path`."""
        del path
        return array

    def unpack(self, path: TreePath, leaf: Any) -> Array:
        """The canonical array of a served leaf."""
        del path
        return np.asarray(leaf)

    @property
    def is_canonical(self) -> bool:
        """Served leaves are the canonical ones."""
        return type(self) is WeightLayout


CANONICAL = WeightLayout()


class CPUPacked(WeightLayout):
    """Matrices in the panels of the CPU kernels."""

    def __init__(self, kernels: str, *, quantized: bool = False) -> None:
        """Pack for the kernels of an instruction set, in 8 bits if `quantized`."""
        self._kernels = kernels
        self._quantized = quantized
        self.name = f"packed-{'int8-' if quantized else ''}{kernels}-1"

    def pack(self, path: TreePath, array: Array) -> Any:
        """A `PackedWeight` of a matrix; anything else as it is."""
        name = path[-1]
        if name not in _PACKED_INPUTS:
            return array
        inputs, gated = _PACKED_INPUTS[name], name == "gate_up"
        return pack(array, self._kernels, inputs=inputs, gated=gated, quantized=self._quantized)

    def unpack(self, path: TreePath, leaf: Any) -> Array:
        """The inverse: bit for bit, or what the 8 bits stand for."""
        return unpack(leaf) if isinstance(leaf, PackedWeight) else np.asarray(leaf)


class Int8(WeightLayout):
    """Matrices in 8 bits, for XLA."""

    name = "int8-1"

    def pack(self, path: TreePath, array: Array) -> Any:
        """A `QuantizedWeight` of a matrix; anything else as it is."""
        if path[-1] not in _PACKED_INPUTS:
            return array
        split = array.ndim - _PACKED_INPUTS[path[-1]]
        features, inputs = array.shape[:split], array.shape[split:]
        codes, scale = quantize(array.reshape(math.prod(features), -1))
        return QuantizedWeight(codes, scale, features, inputs)

    def unpack(self, path: TreePath, leaf: Any) -> Array:
        """What the 8 bits stand for, in bfloat16."""
        if not isinstance(leaf, QuantizedWeight):
            return np.asarray(leaf)
        rows = dequantize(np.asarray(leaf.codes), np.asarray(leaf.scale))
        return rows.reshape(*leaf.features, *leaf.inputs)


def weight_layout(
    config: EngineConfig, dtype: np.dtype[Any], device: jax.Device, kernels: str | None
) -> WeightLayout:
    """The layout in which weights are served.

    Args:
        config: number of devices, and the quantisation of weights.
        dtype: type of the canonical weights.
        device: one of those that will serve them.
        kernels: instruction set of the CPU kernels that are loaded; None if there are none.

    Raises:
        ValueError: the quantisation is not to be had with that type or number of devices.
    """
    quantized = config.quantization == "int8"
    if quantized and dtype != ml_dtypes.bfloat16:
        raise ValueError(f"quantization='int8' needs dtype='bfloat16', not {str(dtype)!r}")
    if quantized and config.tensor_parallel_size > 1:
        raise ValueError(
            f"quantization='int8' runs on one device, not on tensor_parallel_size="
            f"{config.tensor_parallel_size}; use quantization='none'"
        )
    one_device = config.tensor_parallel_size == 1
    if kernels and device.platform == "cpu" and one_device and dtype == ml_dtypes.bfloat16:
        return CPUPacked(kernels, quantized=quantized)
    return Int8() if quantized else CANONICAL


def load_cpu_kernels(name: str, directory: Path) -> str | None:
    """Build and load the CPU kernels; their instruction set, or None if XLA must do.

    Args:
        name: "off", an instruction set, or "auto" for the best that this machine can have.
        directory: where compiled libraries are kept.

    What cannot be had is said in one log line; nothing fails for it.
    """
    if name == "off":
        return None
    wanted = cpu.best_first() if name == "auto" else (cpu.instruction_set(name),)
    possible = [known for known in wanted if not known.missing()]
    reason = None if possible else _nothing_for(wanted)
    for instructions in possible:
        try:
            cpu.load(instructions, directory)
        except cpu.Unavailable as error:
            reason = reason or f"{instructions.name} cannot be had: {error}"
        else:
            if reason is not None:
                log.warning("CPU kernels: %s serves, as %s", instructions.name, reason)
            log.info("CPU kernels: %s", instructions.name)
            return instructions.name
    log.warning("CPU kernels are off, XLA serves instead, more slowly: %s", reason)
    return None


def _nothing_for(wanted: tuple[cpu.InstructionSet, ...]) -> str:
    least = wanted[-1]
    return f"this CPU has no {', '.join(least.missing())}, which {least.name} needs"


def serve(params: Params, layout: WeightLayout) -> Params:
    """The served tree of a canonical one, of host arrays."""
    served: Params = _mapped(params, lambda path, leaf: layout.pack(path, np.asarray(leaf)))
    return served


def canonical(served: Params, layout: WeightLayout) -> Params:
    """The canonical tree of a served one, of host arrays."""
    params: Params = _mapped(served, layout.unpack)
    return params


def _mapped(tree: Any, function: Callable[[TreePath, Any], Any], path: TreePath = ()) -> Any:
    if not isinstance(tree, dict):
        return function(path, tree)
    return {key: _mapped(value, function, (*path, key)) for key, value in tree.items()}

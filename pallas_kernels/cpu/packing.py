"""The layout of weights that the kernels read: panels of 32 outputs, see `src/matmul.h`.

Pure NumPy and exact: packing only moves elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PANEL = 32
_STEP_BYTES = 4
_STEPS = 16


def pack(weight: Array) -> Array:
    """`[n, k]` as `[panels, steps, 32, per_step]`, zeros where there was nothing.

    `per_step` inputs fill 4 bytes: 2 of bfloat16, 4 of int8.
    """
    outputs, inputs = weight.shape
    per_step = _STEP_BYTES // weight.dtype.itemsize
    padding = (-outputs % PANEL, -inputs % (_STEPS * per_step))
    if any(padding):
        weight = np.pad(weight, ((0, padding[0]), (0, padding[1])))
    split = weight.reshape(-1, PANEL, weight.shape[1] // per_step, per_step)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3))


def unpack(packed: Array, outputs: int, inputs: int) -> Array:
    """The inverse of `pack`."""
    panels, steps, _, per_step = packed.shape
    weight = packed.transpose(0, 2, 1, 3).reshape(panels * PANEL, steps * per_step)
    return np.ascontiguousarray(weight[:outputs, :inputs])


def interleave(gate_up: Array) -> Array:
    """Rows `[f, 2, ...]` in the order of the gated kernel: 16 gates, then their 16 ups, ..."""
    half = PANEL // 2
    padding = -gate_up.shape[0] % half
    if padding:
        gate_up = np.pad(gate_up, ((0, padding), *((0, 0),) * (gate_up.ndim - 1)))
    split = gate_up.reshape(-1, half, *gate_up.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(-1, *gate_up.shape[2:])


def separate(rows: Array, width: int) -> Array:
    """The inverse of `interleave`: `[f, 2, ...]` for `f = width`."""
    half = PANEL // 2
    split = rows.reshape(-1, 2, half, *rows.shape[1:])
    joined = split.swapaxes(1, 2).reshape(-1, 2, *rows.shape[1:])
    return np.ascontiguousarray(joined[:width])

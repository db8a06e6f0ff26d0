"""The layout of weights that the kernels read: panels of 32 outputs, see `src/matmul.h`.

Pure NumPy and exact: packing only moves elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PANEL = 32
GROUP = 32
"""Inputs that share a scale in grouped weights."""
_STEP_BYTES = 4
_STEPS = 16


def pack(weight: Array) -> Array:
    """`[n, k]` as `[panels, steps, 32, per_step]`, zeros where there was nothing.

    `per_step` inputs fill 4 bytes: 2 of bfloat16.
    """
    outputs, inputs = weight.shape
    per_step = _STEP_BYTES // weight.dtype.itemsize
    padding = (-outputs % PANEL, -inputs % (_STEPS * per_step))
    if any(padding):
        weight = np.pad(weight, ((0, padding[0]), (0, padding[1])))
    return pack_rows(weight, per_step)


def pack_rows(weight: Array, per_step: int) -> Array:
    """Whole panels and steps of `[n, k]` as `[n / 32, k / per_step, 32, per_step]`."""
    split = weight.reshape(-1, PANEL, weight.shape[1] // per_step, per_step)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3))


def unpack(packed: Array, outputs: int, inputs: int) -> Array:
    """The inverse of `pack`."""
    panels, steps, _, per_step = packed.shape
    weight = packed.transpose(0, 2, 1, 3).reshape(panels * PANEL, steps * per_step)
    return np.ascontiguousarray(weight[:outputs, :inputs])


def pack_groups(weight: Array, scale: Array) -> Array:
    """`int8[n, k]` with `bf16[n, k / 32]` scales as `u8[panels, groups, 1088]`.

    A group is 32 inputs: 32 scales of 2 bytes, then 16 steps of 32 outputs with 2 inputs each.
    """
    outputs, groups = scale.shape
    padding = ((0, -outputs % PANEL), (0, groups * GROUP - weight.shape[1]))
    steps = pack_rows(np.pad(weight, padding), 2)  # [panels, steps, 32, 2]
    codes = steps.reshape(len(steps), groups, -1).view(np.uint8)
    scales = np.pad(scale, (padding[0], (0, 0))).reshape(-1, PANEL, groups).swapaxes(1, 2)
    return np.concatenate([np.ascontiguousarray(scales).view(np.uint8), codes], axis=2)


def unpack_groups(
    packed: Array, outputs: int, inputs: int, scale_dtype: Any
) -> tuple[Array, Array]:
    """The inverse of `pack_groups`: weights and scales."""
    panels, groups, _ = packed.shape
    codes = np.ascontiguousarray(packed[:, :, 2 * PANEL :]).view(np.int8)
    weight = unpack(codes.reshape(panels, groups * _STEPS, PANEL, 2), outputs, inputs)
    scales = np.ascontiguousarray(packed[:, :, : 2 * PANEL]).view(scale_dtype).swapaxes(1, 2)
    return weight, np.ascontiguousarray(scales.reshape(-1, groups)[:outputs])


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

"""8-bit weights: symmetric, with one scale for every 32 inputs of an output.

Rows stay bfloat16: quantising them too flips near ties of a small model's logits
(docs/quantization.md has the numbers).  A group of 32 is what llama.cpp's Q8_0 has.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

GROUP = 32
"""Inputs that share a scale."""
_BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_LARGEST = 127
_TRIED_SCALES = 16
_BLOCK = 1 << 18
"""Weights at a time: few enough to stay in a cache while the scales are tried."""


def quantize(
    weight: npt.NDArray[Any],  # [n, k]
) -> tuple[npt.NDArray[np.int8], npt.NDArray[Any]]:  # int8[n, k], bf16[n, ceil(k / 32)]
    """Codes and scales with `weight ~ codes * scales`, the error at most half a scale.

    A scale is that of the 16 bfloat16 numbers from a group's largest magnitude over 127 upwards
    whose codes have the least squared error.  Weights that were quantised before, to fewer bits,
    lie on a grid that one of them often meets.  A group with a weight that is not finite has a
    scale that is not.
    """
    outputs, inputs = weight.shape
    num_groups = -(-inputs // GROUP)
    codes = np.empty((outputs, inputs), np.int8)
    scale = np.empty((outputs, num_groups), _BFLOAT16)
    step = max(1, _BLOCK // max(1, inputs))
    with np.errstate(all="ignore"):  # of what is not finite
        for begin in range(0, outputs, step):
            part = slice(begin, begin + step)
            groups = _grouped(weight[part])
            chosen = _best_scale(groups)
            scale[part] = chosen.reshape(-1, num_groups)
            codes[part] = _codes(groups, chosen).reshape(-1, num_groups * GROUP)[:, :inputs]
    return codes, scale


def dequantize(
    codes: npt.NDArray[np.int8],  # [n, k]
    scale: npt.NDArray[Any],  # [n, groups]
) -> npt.NDArray[Any]:  # bf16[n, k]
    """Codes times scales, rounded once."""
    each = np.repeat(scale.astype(np.float32), GROUP, axis=1)[:, : codes.shape[1]]
    with np.errstate(invalid="ignore"):  # nothing times infinity
        product: npt.NDArray[Any] = (codes * each).astype(_BFLOAT16)
    return product


def _grouped(weight: npt.NDArray[Any]) -> npt.NDArray[np.float32]:  # [groups, 32]
    wide = weight.astype(np.float32)
    return np.pad(wide, ((0, 0), (0, -wide.shape[1] % GROUP))).reshape(-1, GROUP)


def _best_scale(groups: npt.NDArray[np.float32]) -> npt.NDArray[Any]:  # bf16[groups]
    first = (np.abs(groups).max(-1) / _LARGEST).astype(_BFLOAT16)
    best: npt.NDArray[Any] = first.copy()
    least = np.full(len(groups), np.inf, np.float32)
    error = np.empty_like(groups)
    for above in range(_TRIED_SCALES):
        scale = (first.view(np.uint16) + np.uint16(above)).view(_BFLOAT16)
        factor = scale.astype(np.float32)[:, None]
        np.multiply(groups, 1 / factor, out=error)
        np.rint(error, out=error)
        error *= factor
        error -= groups
        squared = np.einsum("gk,gk->g", error, error)
        better = squared < least
        best[better], least[better] = scale[better], squared[better]
    return best


def _codes(groups: npt.NDArray[np.float32], scale: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)[:, None]
    codes: npt.NDArray[np.int8] = np.clip(np.rint(groups / divisor), -_LARGEST, _LARGEST).astype(
        np.int8
    )
    return codes

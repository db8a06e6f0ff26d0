"""Weight types by name, and exact conversion between them.

Knows NumPy and its bfloat16 extension; no files and no models.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BY_NAME: dict[str, np.dtype[Any]] = {
    "auto": np.dtype(ml_dtypes.bfloat16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


def weight_dtype(name: str) -> np.dtype[Any]:
    """The NumPy type of a configured dtype; "auto" is bfloat16.

    Raises:
        ValueError: an unknown name.
    """
    if name not in _BY_NAME:
        raise ValueError(f"dtype={name!r} is not one of {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def cast(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Convert with rounding to nearest even; exact where the type is wide enough.

    Raises:
        ValueError: a finite value is too large for float16, naming the tensor.
    """
    with np.errstate(over="ignore"):
        converted = array.astype(dtype, copy=False)
    if dtype == np.float16 and array.dtype != np.float16:
        lost = np.isinf(converted) & np.isfinite(array)
        if lost.any():
            raise ValueError(
                f"{name} has {int(lost.sum())} values beyond float16's range; "
                "load it as bfloat16 or float32"
            )
    return converted

"""Random weights for a configuration, for sizing and speed without a checkpoint.

Knows distributions only; reads no file.  The weights are made on the device: a large model is
there in seconds and never in host memory.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.loading.canonical import Leaf, Put, build_tree
from jaxserve.models.config import ModelConfig

STDDEV = 0.02
_NORMS = ("attn_norm", "mlp_norm", "norm", "q_norm", "k_norm")


def dummy_params(config: ModelConfig, dtype: np.dtype[Any], seed: int, put: Put) -> dict[str, Any]:
    """A canonical tree of N(0, 0.02^2) weights and norms of one.

    Args:
        config: the model's.
        dtype: of every leaf.
        seed: a leaf's values are a function of this and of its path alone.
        put: places a leaf, which is an array of the default device.
    """
    import jax

    normal, root = _normal(dtype), jax.random.key(seed)

    def make(leaf: Leaf) -> Any:
        if leaf.path[-1] in _NORMS:
            return put(leaf.path, np.ones(leaf.shape, dtype))
        key = jax.random.fold_in(root, zlib.crc32(repr(leaf.path).encode()))
        return put(leaf.path, normal(key, leaf.shape))

    return build_tree(config, make)


@functools.cache
def _normal(dtype: np.dtype[Any]) -> Callable[[Any, tuple[int, ...]], Any]:
    """Compiled once per shape, however many layers have it."""
    import jax

    def make(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (jax.random.normal(key, shape, np.float32) * STDDEV).astype(dtype)

    return jax.jit(make, static_argnums=1)

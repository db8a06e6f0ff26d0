"""Random weights for a configuration, for benchmarks and tests without a checkpoint.

Knows distributions only; reads no file.
"""

from __future__ import annotations

import zlib
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
        put: places a leaf.
    """

    def make(leaf: Leaf) -> Any:
        if leaf.path[-1] in _NORMS:
            return put(leaf.path, np.ones(leaf.shape, dtype))
        stream = zlib.crc32(repr(leaf.path).encode())
        generator = np.random.Generator(np.random.SFC64([seed, stream]))
        values = generator.standard_normal(leaf.shape, np.float32)
        return put(leaf.path, (values * np.float32(STDDEV)).astype(dtype))

    return build_tree(config, make)

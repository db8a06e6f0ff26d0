"""Where arrays live: the mesh, and how weights, cache and carry are split over it.

Tensor parallelism (arXiv:1909.08053) over the KV heads: each device has its share of the heads
of every layer and of the rows of the feed-forward network; embeddings, norms, carry and batch
are everywhere.  One device is a mesh of one, not another code path.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.config import ModelConfig
from jaxserve.spec import TENSOR_AXIS

_SPLIT = {
    "qkv": PartitionSpec(TENSOR_AXIS),
    "qkv_bias": PartitionSpec(TENSOR_AXIS),
    "out": PartitionSpec(None, TENSOR_AXIS),
    "gate_up": PartitionSpec(TENSOR_AXIS),
    "down": PartitionSpec(None, TENSOR_AXIS),
}


def make_mesh(platform: str, num_devices: int) -> Mesh:
    """A mesh of the first `num_devices` devices of a platform.

    Raises:
        ValueError: there are fewer.
    """
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise ValueError(f"no {platform} device: {error}") from error
    if len(devices) < num_devices:
        raise ValueError(
            f"tensor_parallel_size={num_devices}, but there are {len(devices)} {platform} devices"
        )
    return Mesh(np.array(devices[:num_devices]), (TENSOR_AXIS,))


def check_divisible(model: ModelConfig, num_devices: int) -> None:
    """Raise ValueError if the model's heads or rows cannot be split evenly."""
    for name in ("num_kv_heads", "intermediate_size"):
        size = getattr(model, name)
        if size % num_devices:
            raise ValueError(
                f"tensor_parallel_size={num_devices} does not divide the model's {name}={size}"
            )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def placed(mesh: Mesh, specs: Any) -> Any:
    """The tree of shardings that a tree of partition specs asks for."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def of_weight(mesh: Mesh, path: tuple[Any, ...]) -> NamedSharding:
    """Sharding of the weight at `path` of the canonical tree."""
    return NamedSharding(mesh, _SPLIT.get(path[-1], PartitionSpec()))

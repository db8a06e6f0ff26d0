"""From a model's files to the weights that are served: read as kept, or converted and packed.

Knows the order of these steps; not how files are read, weights are packed or arrays are split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve import sharding
from jaxserve.host_memory import Arena
from jaxserve.loading import ModelSource, load_params, origin
from jaxserve.loading.canonical import get, leaves
from jaxserve.loading.source import CONVERSION_VERSION
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Params
from jaxserve.progress import Progress
from jaxserve.weight_cache import WeightCache
from jaxserve.weight_file import TreePath
from jaxserve.weights import WeightLayout


def served_weights(
    source: ModelSource,
    model: ModelConfig,
    dtype: np.dtype[Any],
    layout: WeightLayout,
    mesh: Mesh,
    directory: Path,
) -> Params:
    """The tree that a runner serves, on the devices of the mesh.

    On a CPU the arrays lie in huge pages and are what was read, not copies of it.

    Args:
        source: the model.
        model: its configuration.
        dtype: of the canonical weights.
        layout: how they are packed.
        mesh: the devices.
        directory: where packed weights are kept; weights that are served as their file has them
            are not.

    Raises:
        ValueError: as `load_params`.
    """
    placer = _Placer(mesh)
    cache = _cache(source, model, dtype, layout, directory)
    if cache is not None:
        kept = cache.read(placer.allocate, placer.place)
        if kept is not None:
            return kept
    tree = _converted(source, model, dtype, layout, placer)
    if cache is not None:
        cache.write((leaf.path, get(tree, leaf.path)) for leaf in leaves(model))
    return tree


class _Placer:
    """Puts host leaves onto the devices."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._arena = Arena() if mesh.devices.flat[0].platform == "cpu" else None

    def allocate(self, size: int) -> Any:
        """Memory to read into: on a CPU that of the array to be."""
        return np.empty(size, np.uint8) if self._arena is None else self._arena.allocate(size)

    def place(self, path: TreePath, leaf: Any) -> Any:
        """Place what lies in memory of `allocate`."""
        placed = jax.device_put(leaf, sharding.of_weight(self._mesh, path))
        # Elsewhere, host memory is needed until the transfer has ended: not for all at once.
        return placed if self._arena is not None else jax.block_until_ready(placed)

    def copy(self, path: TreePath, leaf: Any) -> Any:
        """Place what lies anywhere."""
        if self._arena is not None:
            leaf = jax.tree.map(self._arena.copy, leaf)
        return self.place(path, leaf)


def _cache(
    source: ModelSource,
    model: ModelConfig,
    dtype: np.dtype[Any],
    layout: WeightLayout,
    directory: Path,
) -> WeightCache | None:
    if source.format == "dummy" or (source.format != "gguf" and layout.is_canonical):
        return None
    return WeightCache(
        directory,
        f"{source.name}-{dtype.name}-{layout.name}",
        origin(source),
        f"{model!r} {CONVERSION_VERSION}",
    )


def _converted(
    source: ModelSource,
    model: ModelConfig,
    dtype: np.dtype[Any],
    layout: WeightLayout,
    placer: _Placer,
) -> Params:
    with Progress("loading weights", sum(1 for _ in leaves(model)), "tensors") as progress:

        def put(path: TreePath, array: Any) -> Any:
            if not layout.is_canonical:
                array = layout.pack(path, np.asarray(array))
            placed = placer.copy(path, array)
            progress.advance()
            return placed

        return load_params(source, model, dtype, put)

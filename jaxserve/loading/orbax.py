"""Orbax checkpoints of the canonical tree, with config.json and tokenizer files beside them.

Layout: DIR/checkpoint is the checkpoint proper.  Restores whatever the layout and dtype it was
saved with.  Does not know where leaves are placed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.files import copy_tokenizer_files
from jaxserve.loading.arrays import cast
from jaxserve.loading.canonical import Leaf, Put, build_tree, leaves
from jaxserve.loading.hf import write_config
from jaxserve.models.config import ModelConfig

CHECKPOINT = "checkpoint"
_UNFINISHED = ".orbax-checkpoint-tmp"
_MARK = "_CHECKPOINT_METADATA"


def find_checkpoint(directory: Path) -> Path | None:
    """The checkpoint of a directory that `save_orbax` wrote, or None if it is no such directory.

    Raises:
        ValueError: the checkpoint was never finished, or is one without the files beside it.
    """
    if _UNFINISHED in directory.name:
        raise ValueError(_unfinished_message(directory))
    checkpoint = directory / CHECKPOINT
    if checkpoint.is_dir():
        return checkpoint
    if unfinished := sorted(directory.glob(f"*{_UNFINISHED}*")):
        raise ValueError(_unfinished_message(unfinished[0]))
    if (directory / _MARK).is_file():
        raise ValueError(
            f"{directory} is a bare Orbax checkpoint; give a directory that holds it as "
            f"{CHECKPOINT!r} beside the model's config.json"
        )
    return None


def _unfinished_message(path: Path) -> str:
    return f"{path} is an unfinished Orbax checkpoint: its writing was interrupted; save it again"


def save_orbax(
    directory: Path,
    config: ModelConfig,
    params: Mapping[Any, Any],
    tokenizer_from: Path | None = None,
) -> None:
    """Write a checkpoint of the tree, the configuration and the tokenizer files.

    Args:
        directory: made if it is not there.  The checkpoint appears in it only when complete.
        config: the model's.
        params: the canonical tree; NumPy or JAX arrays, sharded in any way.
        tokenizer_from: directory whose tokenizer files are copied.

    Raises:
        ValueError: the directory holds a checkpoint already.
    """
    import orbax.checkpoint as ocp

    if (directory / CHECKPOINT).exists():
        raise ValueError(f"{directory} holds a checkpoint already; choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, config, np.dtype(params["norm"].dtype))
    if tokenizer_from is not None:
        copy_tokenizer_files(tokenizer_from, directory)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((directory / CHECKPOINT).resolve(), _named(params))


def load_orbax_params(
    directory: Path, config: ModelConfig, dtype: np.dtype[Any], put: Put
) -> dict[str, Any]:
    """Restore the tree, one layer in host memory at a time.

    Args:
        directory: written by `save_orbax`.
        config: the model's.
        dtype: of every leaf, whatever the saved one.
        put: places a leaf, whatever devices it was saved from.

    Raises:
        ValueError: there is no finished checkpoint, it is damaged, or leaves are missing,
            unexpected or of the wrong shape, all of them named.
    """
    import orbax.checkpoint as ocp

    checkpoint = find_checkpoint(directory)
    if checkpoint is None:
        raise ValueError(f"{directory} has no {CHECKPOINT!r} directory")
    checkpoint = checkpoint.resolve()
    with ocp.PyTreeCheckpointer() as checkpointer:
        try:
            saved = dict(_flat(checkpointer.metadata(checkpoint).item_metadata.tree))
        except Exception as error:  # Orbax and its storage raise many kinds
            raise ValueError(_damaged(checkpoint, error)) from error
        _check(saved, config, checkpoint)
        reader = _LayerReader(checkpointer, checkpoint, config)

        def make(leaf: Leaf) -> Any:
            array = reader.read(leaf)
            return put(leaf.path, cast(array, dtype, ".".join(_names(leaf.path))))

        return build_tree(config, make)


class _LayerReader:
    """Restores the leaves of a layer together, since each restore call has a fixed cost."""

    def __init__(self, checkpointer: Any, checkpoint: Path, config: ModelConfig) -> None:
        self._checkpointer = checkpointer
        self._checkpoint = checkpoint
        self._leaves = list(leaves(config))
        self._arrays: dict[tuple[str, ...], Any] = {}

    def read(self, leaf: Leaf) -> Any:
        name = _names(leaf.path)
        if name not in self._arrays:
            group = [other for other in self._leaves if other.path[:2] == leaf.path[:2]]
            self._arrays = dict(_flat(self._restore(group)))
        return self._arrays.pop(name)

    def _restore(self, group: list[Leaf]) -> Any:
        import orbax.checkpoint as ocp

        arguments: dict[str, Any] = {}
        for leaf in group:
            node = arguments
            *parents, last = _names(leaf.path)
            for key in parents:
                node = node.setdefault(key, {})
            node[last] = ocp.RestoreArgs(restore_type=np.ndarray)
        try:
            return self._checkpointer.restore(
                self._checkpoint,
                args=ocp.args.PyTreeRestore(
                    item=arguments, restore_args=arguments, partial_restore=True
                ),
            )
        except Exception as error:  # Orbax and its storage raise many kinds
            raise ValueError(_damaged(self._checkpoint, error)) from error


def _check(saved: dict[tuple[str, ...], Any], config: ModelConfig, checkpoint: Path) -> None:
    expected = {_names(leaf.path): leaf.shape for leaf in leaves(config)}
    problems = [f"missing {'.'.join(name)}" for name in expected if name not in saved]
    problems += [f"unexpected {'.'.join(name)}" for name in saved if name not in expected]
    problems += [
        f"{'.'.join(name)} has shape {tuple(saved[name].shape)}, not {shape}"
        for name, shape in expected.items()
        if name in saved and tuple(saved[name].shape) != shape
    ]
    if problems:
        shown = "; ".join(problems[:10]) + ("; ..." if len(problems) > 10 else "")
        raise ValueError(f"{checkpoint} does not fit its config.json: {shown}")


def _damaged(checkpoint: Path, error: Exception) -> str:
    first_line = str(error).strip().split("\n")[0]
    return f"{checkpoint} is not a readable Orbax checkpoint ({first_line}); save it again"


def _names(path: tuple[str | int, ...]) -> tuple[str, ...]:
    return tuple(str(key) for key in path)


def _named(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """The tree with string keys, as Orbax stores it."""
    return {
        str(key): _named(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
    }


def _flat(tree: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for key, value in tree.items():
        yield from _flat(value, (*prefix, str(key)))

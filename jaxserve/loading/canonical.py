"""The canonical parameter tree, and which Hugging Face tensors each of its leaves is made of.

Knows shapes and names.  Reads no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.loading.arrays import Array
from jaxserve.models.config import ModelConfig

Path = tuple[str | int, ...]
Put = Callable[[Path, Any], Any]
"""Places one leaf, an array given with its path, and returns what the tree shall hold."""


@dataclass(frozen=True)
class Leaf:
    """One array of the tree."""

    path: Path
    shape: tuple[int, ...]
    sources: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the Hugging Face tensors it fuses, in the order of `parts`."""


def leaves(config: ModelConfig) -> Iterator[Leaf]:
    """Every leaf of the model's tree, layer by layer."""
    c = config
    yield Leaf(
        ("embed",),
        (c.vocab_size, c.hidden_size),
        (("model.embed_tokens.weight", (c.vocab_size, c.hidden_size)),),
    )
    for i in range(c.num_layers):
        yield from _layer(c, i)
    yield Leaf(("norm",), (c.hidden_size,), (("model.norm.weight", (c.hidden_size,)),))
    if not c.tie_embeddings:
        shape = (c.vocab_size, c.hidden_size)
        yield Leaf(("head",), shape, (("lm_head.weight", shape),))


def _layer(c: ModelConfig, i: int) -> Iterator[Leaf]:
    hf = f"model.layers.{i}"
    hidden, inner, dim, kv, group = (
        c.hidden_size,
        c.intermediate_size,
        c.head_dim,
        c.num_kv_heads,
        c.queries_per_kv,
    )
    rows = {"q": c.num_heads * dim, "k": kv * dim, "v": kv * dim}

    def plain(path: Path, name: str, shape: tuple[int, ...], hf_shape: tuple[int, ...]) -> Leaf:
        return Leaf(("layers", i, *path), shape, ((f"{hf}.{name}.weight", hf_shape),))

    def qkv(name: str, kind: str, inputs: tuple[int, ...]) -> Leaf:
        return Leaf(
            ("layers", i, "attn", name),
            (kv, group + 2, dim, *inputs),
            tuple((f"{hf}.self_attn.{x}_proj.{kind}", (n, *inputs)) for x, n in rows.items()),
        )

    yield plain(("attn_norm",), "input_layernorm", (hidden,), (hidden,))
    yield qkv("qkv", "weight", (hidden,))
    if c.qkv_bias:
        yield qkv("qkv_bias", "bias", ())
    if c.qk_norm:
        yield plain(("attn", "q_norm"), "self_attn.q_norm", (dim,), (dim,))
        yield plain(("attn", "k_norm"), "self_attn.k_norm", (dim,), (dim,))
    yield plain(("attn", "out"), "self_attn.o_proj", (hidden, kv, group, dim), (hidden, rows["q"]))
    yield plain(("mlp_norm",), "post_attention_layernorm", (hidden,), (hidden,))
    yield Leaf(
        ("layers", i, "mlp", "gate_up"),
        (inner, 2, hidden),
        tuple((f"{hf}.mlp.{x}_proj.weight", (inner, hidden)) for x in ("gate", "up")),
    )
    yield plain(("mlp", "down"), "mlp.down_proj", (hidden, inner), (hidden, inner))


def parts(leaf: Leaf, array: Array) -> tuple[Array, ...]:
    """Views of the leaf's array, one per source tensor; each reshapes to that tensor."""
    name = leaf.path[-1]
    if name in ("qkv", "qkv_bias"):
        return array[:, :-2], array[:, -2], array[:, -1]
    if name == "gate_up":
        return array[:, 0], array[:, 1]
    return (array,)


def fuse(leaf: Leaf, read: Callable[[str], Array], dtype: np.dtype[Any]) -> Array:
    """Make the leaf from its source tensors, which `read` gives by name in the dtype wanted."""
    if len(leaf.sources) == 1:
        return read(leaf.sources[0][0]).reshape(leaf.shape)
    array = np.empty(leaf.shape, dtype)
    for (name, _), part in zip(leaf.sources, parts(leaf, array), strict=True):
        part[...] = read(name).reshape(part.shape)
    return array


def build_tree(config: ModelConfig, make: Callable[[Leaf], Any]) -> dict[str, Any]:
    """The nested dict of what `make` returns for each leaf."""
    tree: dict[str, Any] = {}
    for leaf in leaves(config):
        node: dict[Any, Any] = tree
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = make(leaf)
    return tree


def get(tree: Mapping[Any, Any], path: Path) -> Any:
    """The value at a path of the tree.

    Raises:
        ValueError: there is none, naming the path.
    """
    node: Any = tree
    for key in path:
        if not isinstance(node, Mapping) or key not in node:
            raise ValueError(f"the parameter tree has no {'.'.join(map(str, path))}")
        node = node[key]
    return node


def hf_tensors(params: Mapping[Any, Any], config: ModelConfig) -> Iterator[tuple[str, Array]]:
    """The Hugging Face tensors of a canonical tree, name by name; inverse of loading.

    Args:
        params: the tree; leaves are NumPy arrays or convert to them (JAX arrays do).
        config: the model's.

    Raises:
        ValueError: a leaf is missing or has the wrong shape.
    """
    for leaf in leaves(config):
        array = np.asarray(get(params, leaf.path))
        if array.shape != leaf.shape:
            raise ValueError(
                f"parameter {'.'.join(map(str, leaf.path))} has shape {array.shape}; "
                f"the model needs {leaf.shape}"
            )
        for (name, shape), part in zip(leaf.sources, parts(leaf, array), strict=True):
            yield name, np.ascontiguousarray(part).reshape(shape)


def canonical_to_hf(params: Mapping[Any, Any], config: ModelConfig) -> dict[str, Array]:
    """`hf_tensors` as a dict."""
    return dict(hf_tensors(params, config))

"""A bare greedy decode step: what plain XLA can do on a CPU with nothing of an engine around it.

Raw arrays, fixed context, no batching logic: weights as rows, a table of rotary angles, uint16
pages of 64 tokens, attention row by row over each row's own pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxserve.models.config import ModelConfig

PAGE = 64
CONTEXT = 160
STEPS = 16
MAX_LENGTH = 512
BF16 = ml_dtypes.bfloat16

Tree = Any


class Recipe:
    """The step of one model over its canonical weights."""

    def __init__(self, config: ModelConfig, params: Tree) -> None:
        """Lay out the weights."""
        self._config = config
        self._weights = _flat(config, params)
        angle = np.arange(2048)[:, None] * config.rope.inv_freq(config.head_dim)
        self._angles = jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)], 1), jnp.float32)
        self._step = jax.jit(partial(_step, config), donate_argnums=1)

    def runner(self, slots: int) -> Callable[[], float]:
        """A function that decodes some steps for so many rows: seconds of each."""
        config, per_slot = self._config, MAX_LENGTH // PAGE
        shape = (slots * per_slot + 1, 2, config.num_kv_heads, PAGE, config.head_dim)
        state = {"cache": tuple(jnp.zeros(shape, jnp.uint16) for _ in range(config.num_layers))}
        table = jnp.asarray(1 + np.arange(slots * per_slot).reshape(slots, -1), jnp.int32)

        def run() -> float:
            token = jnp.zeros(slots, jnp.int32)
            pos = jnp.full(slots, CONTEXT - 8, jnp.int32)
            token.block_until_ready()
            start = time.perf_counter()
            for _ in range(STEPS):
                state["cache"], token, pos = self._step(
                    self._weights, state["cache"], token, pos, table, self._angles
                )
            token.block_until_ready()
            return (time.perf_counter() - start) / STEPS

        run()
        return run


def _step(
    config: ModelConfig,
    params: Tree,
    cache: tuple[jax.Array, ...],
    token: jax.Array,
    pos: jax.Array,
    table: jax.Array,
    angles: jax.Array,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """The next token of each row, which is at the position it is told."""
    kv, eps = config.num_kv_heads, config.rms_eps
    x = params["embed"][token].astype(jnp.float32)
    page = jnp.take_along_axis(table, (pos // PAGE)[:, None], 1)[:, 0]
    new_cache = []
    for i, pages in enumerate(cache):
        layer = params["layers"][i]
        qkv = _product(_norm(x, layer["attn_norm"], eps), layer["qkv"])
        qkv = qkv.reshape(len(token), config.num_heads + 2 * kv, config.head_dim)
        rotate = partial(_rotate, angles=angles[pos][:, None])
        q, k = rotate(qkv[:, : config.num_heads]), rotate(qkv[:, config.num_heads : -kv])
        cells = jnp.stack([k, qkv[:, -kv:].astype(BF16)], 1)
        pages = pages.at[page, :, :, pos % PAGE].set(lax.bitcast_convert_type(cells, jnp.uint16))
        attended = lax.map(partial(_attend, config, pages), (q, table, pos + 1))
        x = x + _product(attended, layer["out"])
        gate, up = jnp.split(_product(_norm(x, layer["mlp_norm"], eps), layer["gate_up"]), 2, -1)
        x = x + _product((jax.nn.silu(gate) * up).astype(BF16), layer["down"])
        new_cache.append(pages)
    logits = _product(_norm(x, params["norm"], eps), params["embed"])
    return tuple(new_cache), jnp.argmax(logits, -1).astype(jnp.int32), pos + 1


def _attend(
    config: ModelConfig, pages: jax.Array, row: tuple[jax.Array, jax.Array, jax.Array]
) -> jax.Array:
    """One row's query over its own pages, with a running softmax."""
    query, mine, length = row
    kv, dim = config.num_kv_heads, config.head_dim
    group = config.num_heads // kv
    query = query.astype(jnp.float32).reshape(kv, group, dim) * dim**-0.5

    def page(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, weight, total = state
        cells = lax.dynamic_index_in_dim(pages, mine[i], keepdims=False)
        keys, values = lax.bitcast_convert_type(cells, BF16).astype(jnp.float32)
        logits = jnp.einsum("hgd,htd->hgt", query, keys)
        logits = jnp.where(i * PAGE + jnp.arange(PAGE) < length, logits, -1e30)
        new = jnp.maximum(largest, logits.max(-1, keepdims=True))
        p, shrink = jnp.exp(logits - new), jnp.exp(largest - new)
        total = total * shrink + jnp.einsum("hgt,htd->hgd", p, values)
        return new, weight * shrink + p.sum(-1, keepdims=True), total

    start = (
        jnp.full((kv, group, 1), -1e30),
        jnp.zeros((kv, group, 1)),
        jnp.zeros((kv, group, dim)),
    )
    _, weight, total = lax.fori_loop(0, (length + PAGE - 1) // PAGE, page, start)
    return (total / weight).reshape(-1).astype(BF16)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    mean = jnp.mean(x * x, -1, keepdims=True)
    return (x * lax.rsqrt(mean + eps) * scale.astype(jnp.float32)).astype(BF16)


def _rotate(y: jax.Array, angles: jax.Array) -> jax.Array:
    cos, sin = jnp.split(angles, 2, -1)
    a, b = jnp.split(y, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(BF16)


def _flat(config: ModelConfig, tree: Tree) -> Tree:
    """The canonical weights as the recipe's matrices."""
    group, hidden = config.num_heads // config.num_kv_heads, config.hidden_size
    layers = {}
    for i, layer in tree["layers"].items():
        attn, mlp = layer["attn"], layer["mlp"]
        qkv = np.asarray(attn["qkv"])
        parts = (qkv[:, :group], qkv[:, group], qkv[:, group + 1])
        gate_up = np.asarray(mlp["gate_up"]).transpose(1, 0, 2).reshape(-1, hidden)
        layers[i] = {
            "attn_norm": layer["attn_norm"],
            "mlp_norm": layer["mlp_norm"],
            "qkv": jnp.asarray(np.concatenate([p.reshape(-1, hidden) for p in parts])),
            "out": attn["out"].reshape(hidden, -1),
            "gate_up": jnp.asarray(gate_up),
            "down": mlp["down"],
        }
    return {"embed": tree["embed"], "norm": tree["norm"], "layers": layers}

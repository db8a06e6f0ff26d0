"""The Llama-type decoder as Flax NNX modules: Llama, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3.

One definition serves generation over a paged cache, scoring and gradients: the modules compute
everything but attention itself, which the caller passes in as `attend`.  They know nothing of
pages, slots or batches; a row is a token at a position.

Axes in comments: T rows, H hidden, F intermediate, V vocabulary, K kv heads, G query heads per
kv head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import linear
from jaxserve.models.rope import inv_freq

Init = Callable[[tuple[int, ...]], jax.Array]
"""Makes one weight of a given shape."""


class Attend(Protocol):
    """Attention of the rows of one layer to whatever they may see."""

    def __call__(
        self,
        layer: int,
        q: jax.Array,  # [T, K * G, D], rotated
        k: jax.Array,  # [T, K, D], rotated
        v: jax.Array,  # [T, K, D]
    ) -> jax.Array:  # [T, K * G, D]
        """Attention output in the type of `q`."""


class Rotation:
    """Cosines and sines of the rows' rotary angles (RoPE, arXiv:2104.09864)."""

    def __init__(self, config: ModelConfig, positions: jax.Array) -> None:
        """Compute the angles of `positions`, i32[T], once for all layers.

        The barrier keeps XLA from recomputing them inside every layer that uses them.
        """
        frequencies = inv_freq(config.rope, config.head_dim).astype(np.float32)
        angles = positions.astype(jnp.float32)[:, None] * frequencies
        scale = config.rope.attention_scaling
        self.cos, self.sin = lax.optimization_barrier(
            (jnp.cos(angles)[:, None] * scale, jnp.sin(angles)[:, None] * scale)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rotate `x` f32[T, heads, D], its first half against its second."""
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate(
            [first * self.cos - second * self.sin, second * self.cos + first * self.sin], axis=-1
        )


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * scale` over the last axis, in float32 (arXiv:1910.07467)."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)


class SelfAttention(nnx.Module):
    """Grouped-query self-attention with its projections (GQA, arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        """Make the weights of one layer's attention."""
        self.config = config
        kv_heads, head_dim, hidden = config.num_kv_heads, config.head_dim, config.hidden_size
        self.group = config.num_heads // kv_heads
        self.qkv = nnx.Param(init((kv_heads, self.group + 2, head_dim, hidden)))
        self.out = nnx.Param(init((hidden, kv_heads, self.group, head_dim)))
        if config.qkv_bias:
            self.qkv_bias = nnx.Param(init((kv_heads, self.group + 2, head_dim)))
        if config.qk_norm:
            self.q_norm = nnx.Param(init((head_dim,)))
            self.k_norm = nnx.Param(init((head_dim,)))

    def __call__(
        self, x: jax.Array, layer: int, rotate: Rotation, attend: Attend
    ) -> jax.Array:  # x [T, H] -> f32[T, H]
        """Project, rotate, attend, project back."""
        qkv = linear(x, self.qkv[...])  # f32[T, K, G + 2, D]
        if self.config.qkv_bias:
            qkv = qkv + self.qkv_bias[...].astype(jnp.float32)
        q = qkv[:, :, : self.group].reshape(x.shape[0], -1, self.config.head_dim)
        k, v = qkv[:, :, self.group], qkv[:, :, self.group + 1]
        if self.config.qk_norm:
            q = rms_norm(q, self.q_norm[...], self.config.rms_eps)
            k = rms_norm(k, self.k_norm[...], self.config.rms_eps)
        q, k, v = (y.astype(x.dtype) for y in (rotate(q), rotate(k), v))
        attended = attend(layer, q, k, v)
        grouped = attended.reshape(x.shape[0], -1, self.group, self.config.head_dim)
        return linear(grouped, self.out[...], contract=3)


class MLP(nnx.Module):
    """Gated feed-forward network, `down(silu(gate(x)) * up(x))` (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        """Make the weights of one layer's network."""
        self.gate_up = nnx.Param(init((config.intermediate_size, 2, config.hidden_size)))
        self.down = nnx.Param(init((config.hidden_size, config.intermediate_size)))

    def __call__(self, x: jax.Array) -> jax.Array:  # x [T, H] -> f32[T, H]
        """Apply the network to each row."""
        gate_up = linear(x, self.gate_up[...])  # f32[T, F, 2]
        hidden = jax.nn.silu(gate_up[..., 0]) * gate_up[..., 1]
        return linear(hidden.astype(x.dtype), self.down[...])


class Block(nnx.Module):
    """One pre-norm transformer layer; the residual stream is float32."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        """Make the weights of one layer."""
        self.eps = config.rms_eps
        self.attn_norm = nnx.Param(init((config.hidden_size,)))
        self.attn = SelfAttention(config, init)
        self.mlp_norm = nnx.Param(init((config.hidden_size,)))
        self.mlp = MLP(config, init)

    def __call__(self, x: jax.Array, layer: int, rotate: Rotation, attend: Attend) -> jax.Array:
        """Add attention, then the feed-forward network, to the residual stream."""
        dtype = self.attn.qkv[...].dtype
        normed = rms_norm(x, self.attn_norm[...], self.eps).astype(dtype)
        x = x + self.attn(normed, layer, rotate, attend)
        normed = rms_norm(x, self.mlp_norm[...], self.eps).astype(dtype)
        return x + self.mlp(normed)


class Llama(nnx.Module):
    """Decoder-only transformer; `__call__` gives hidden rows, `logits` applies the head."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        """Make the weights of `config` with `init`, one call per weight."""
        self.config = config
        self.embed = nnx.Param(init((config.vocab_size, config.hidden_size)))
        self.layers = nnx.List([Block(config, init) for _ in range(config.num_layers)])
        self.norm = nnx.Param(init((config.hidden_size,)))
        if not config.tie_embeddings:
            self.head = nnx.Param(init((config.vocab_size, config.hidden_size)))

    def __call__(
        self,
        tokens: jax.Array,  # i32[T]
        positions: jax.Array,  # i32[T]
        attend: Attend,
    ) -> jax.Array:  # f32[T, H]
        """Hidden rows before the last norm, one per token."""
        x: jax.Array = self.embed.at[tokens].get(mode="clip").astype(jnp.float32)
        rotate = Rotation(self.config, positions)
        for i, layer in enumerate(self.layers):
            x = layer(x, i, rotate, attend)
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:  # f32[T, H] -> f32[T, V]
        """Logits over the vocabulary of hidden rows."""
        weight = self.embed if self.config.tie_embeddings else self.head
        normed = rms_norm(hidden, self.norm[...], self.config.rms_eps)
        return linear(normed.astype(weight[...].dtype), weight[...])


Params = dict[Any, Any]
"""The canonical weight tree: nested dicts with the modules' attribute names, layers by number."""


def abstract_model(
    config: ModelConfig, dtype: np.dtype
) -> tuple[nnx.GraphDef[Llama], nnx.State[Any, Any]]:
    """Structure and shapes of the model of `config`, without any memory."""

    def make() -> Llama:
        return Llama(config, lambda shape: jnp.zeros(shape, dtype))

    graph, state = nnx.split(nnx.eval_shape(make))
    return graph, state


def bind(config: ModelConfig, params: Params) -> Llama:
    """The model of `config` with the weights of a canonical tree; works under any transform."""
    graph, state = abstract_model(config, np.dtype(params["embed"].dtype))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def params_of(model: Llama) -> Params:
    """The canonical tree of a model's weights; the inverse of `bind`."""
    pure: Params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return pure

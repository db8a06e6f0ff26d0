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
from jaxserve.models.norm import rms_norm
from jaxserve.models.rope import inv_freq
from jaxserve.models.weight import Used, Weight, as_weight

Init = Callable[[tuple[int, ...]], jax.Array]
"""Makes one weight of a given shape."""


class Attend(Protocol):
    """Attention of the rows of one layer to whatever they may see."""

    def __call__(
        self,
        layer: int,
        qkv: jax.Array,  # f32[T, K, G + 2, D]
        rotate: Rotation,
    ) -> jax.Array:  # [T, K * G, D]
        """Attention output in the model's type, of queries and keys rotated by `rotate`."""


class Rotation:
    """Rotary angles of the rows (RoPE, arXiv:2104.09864), and the splitting of `qkv`."""

    def __init__(
        self,
        config: ModelConfig,
        positions: jax.Array,
        dtype: np.dtype[Any],
        used: Used = None,
    ) -> None:
        """Compute the angles of `positions`, i32[T], once for all layers.

        The barrier keeps XLA from recomputing them inside every layer that uses them.

        Args:
            config: of the model.
            positions: of the rows' tokens.
            dtype: the model's type.
            used: i32[], how many rows are wanted; see `Weight`.
        """
        self.used = used
        frequencies = inv_freq(config.rope, config.head_dim).astype(np.float32)
        angles = positions.astype(jnp.float32)[:, None] * frequencies
        scale = config.rope.attention_scaling
        self.dtype = dtype
        self.cos, self.sin = lax.optimization_barrier(
            (jnp.cos(angles) * scale, jnp.sin(angles) * scale)
        )  # f32[T, D / 2]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Rotate `x` f32[T, heads, D], its first half against its second."""
        cos, sin = self.cos[:, None], self.sin[:, None]
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def split(self, qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Rotated queries [T, K * G, D] and keys [T, K, D], and values, in the model's type."""
        q = qkv[:, :, :-2].reshape(qkv.shape[0], -1, qkv.shape[-1])
        k, v = qkv[:, :, -2], qkv[:, :, -1]
        q, k, v = (x.astype(self.dtype) for x in (self(q), self(k), v))
        return q, k, v


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
        self, x: jax.Array, norm: jax.Array, layer: int, rotate: Rotation, attend: Attend
    ) -> jax.Array:  # x f32[T, H] -> f32[T, H]
        """Add to `x`: normalise, project, attend, project back."""
        # f32[T, K, G + 2, D]
        qkv = weight(self.qkv).norm_linear(x, norm, self.config.rms_eps, rotate.used)
        if self.config.qkv_bias:
            qkv = qkv + self.qkv_bias[...].astype(jnp.float32)
        if self.config.qk_norm:
            qkv = self._norm_heads(qkv)
        attended = attend(layer, qkv, rotate)
        grouped = attended.reshape(x.shape[0], -1, self.group, self.config.head_dim)
        return weight(self.out, inputs=3).linear_add(grouped, x, rotate.used)

    def _norm_heads(self, qkv: jax.Array) -> jax.Array:
        q, k, v = qkv[:, :, :-2], qkv[:, :, -2:-1], qkv[:, :, -1:]
        q = rms_norm(q, self.q_norm[...], self.config.rms_eps)
        k = rms_norm(k, self.k_norm[...], self.config.rms_eps)
        return jnp.concatenate([q, k, v], axis=2)


class MLP(nnx.Module):
    """Gated feed-forward network, `down(silu(gate(x)) * up(x))` (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        """Make the weights of one layer's network."""
        self.config = config
        self.gate_up = nnx.Param(init((config.intermediate_size, 2, config.hidden_size)))
        self.down = nnx.Param(init((config.hidden_size, config.intermediate_size)))

    def __call__(
        self, x: jax.Array, norm: jax.Array, used: Used
    ) -> jax.Array:  # f32[T, H] -> f32[T, H]
        """Add to `x`: normalise and apply the network to each row."""
        hidden = weight(self.gate_up).norm_swiglu(x, norm, self.config.rms_eps, used)
        return weight(self.down).linear_add(hidden, x, used)


class Block(nnx.Module):
    """One pre-norm transformer layer; the residual stream is float32."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        """Make the weights of one layer."""
        self.attn_norm = nnx.Param(init((config.hidden_size,)))
        self.attn = SelfAttention(config, init)
        self.mlp_norm = nnx.Param(init((config.hidden_size,)))
        self.mlp = MLP(config, init)

    def __call__(self, x: jax.Array, layer: int, rotate: Rotation, attend: Attend) -> jax.Array:
        """Add attention, then the feed-forward network, to the residual stream."""
        x = self.attn(x, self.attn_norm[...], layer, rotate, attend)
        return self.mlp(x, self.mlp_norm[...], rotate.used)


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
        used: Used = None,
    ) -> jax.Array:  # f32[T, H]
        """Hidden rows before the last norm, one per token; anything after the `used` ones."""
        embed = weight(self.embed)
        x = embed.rows(tokens)
        rotate = Rotation(self.config, positions, embed.dtype, used)
        for i, layer in enumerate(self.layers):
            x = layer(x, i, rotate, attend)
        return x

    def logits(self, hidden: jax.Array, used: Used = None) -> jax.Array:  # f32[T, H] -> f32[T, V]
        """Logits over the vocabulary of hidden rows."""
        return self._head.norm_linear(hidden, self.norm[...], self.config.rms_eps, used)

    def greedy(
        self, hidden: jax.Array, used: Used = None, allowed: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:  # f32[T, H] -> i32[T], f32[T]
        """Lowest id of the largest logit of hidden rows, and the logit.

        Only ids count whose bits are set in `allowed`, i32[T, ceil(V / 32)], if it is given.
        The logit is not finite if the row's logits are of no use.
        """
        return self._head.norm_argmax(hidden, self.norm[...], self.config.rms_eps, used, allowed)

    @property
    def _head(self) -> Weight:
        return weight(self.embed if self.config.tie_embeddings else self.head)


def weight(param: nnx.Param[Any], inputs: int = 1) -> Weight:
    """What a parameter holds, an array or a backend's own form, as a `Weight`."""
    return as_weight(param.get_value(), inputs)


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


def abstract_params(config: ModelConfig, dtype: np.dtype) -> Params:
    """Shapes and types of the canonical tree, without any memory."""
    pure: Params = nnx.to_pure_dict(abstract_model(config, dtype)[1])
    return pure


def bind(config: ModelConfig, params: Params) -> Llama:
    """The model of `config` with the weights of a canonical tree; works under any transform."""
    graph, state = abstract_model(config, np.dtype(params["embed"].dtype))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def params_of(model: Llama) -> Params:
    """The canonical tree of a model's weights; the inverse of `bind`."""
    pure: Params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return pure

"""Log-probability of a token sequence through the served modules: the differentiable path.

Attention is dense and causal over the one sequence; every other operation and every weight is the
engine's own.  Knows no pages, slots or steps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Attend, Llama, Rotation


def sequence_log_prob(
    model: Llama,
    tokens: ArrayLike,  # i32[length]
) -> jax.Array:  # f32[]
    """`sum over i >= 1 of log p(tokens[i] | tokens[:i])`, in nats.

    Differentiable in the weights of `model`: `jax.grad` of a function that binds a canonical tree
    gives a tree of the same form, ready for any optimizer and for `Engine.update_weights`.
    The value is the sum of the engine's prompt log-probabilities of the same tokens.

    Args:
        model: `LLM.module()`, or `bind(config, params)` under a transform.
        tokens: the whole sequence; its first token is given, not scored.  A single one scores 0.
    """
    return token_log_probs(model, tokens).sum()


def token_log_probs(
    model: Llama,
    tokens: ArrayLike,  # i32[length]
) -> jax.Array:  # f32[length - 1]
    """`log p(tokens[i] | tokens[:i])` for each i from 1, for losses that weigh tokens."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    hidden = model(tokens, positions, dense_causal(model.config))
    logprobs = jax.nn.log_softmax(model.logits(hidden[:-1]))
    return jnp.take_along_axis(logprobs, tokens[1:, None], axis=1)[:, 0]


def dense_causal(config: ModelConfig) -> Attend:
    """Attention of every row to the rows before it and itself, within its layer's window.

    `softmax(q k^T / sqrt(head_dim)) v` in float32, each group of query heads on its KV head;
    memory is quadratic in the number of rows.
    """

    def attend(layer: int, qkv: jax.Array, rotate: Rotation) -> jax.Array:
        q, k, v = rotate.split(qkv)
        grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
        row = jnp.arange(q.shape[0], dtype=jnp.int32)
        distance = row[:, None] - row
        sees = distance >= 0
        window = config.sliding_windows[layer]
        if window is not None:
            sees &= distance < window
        logits = jnp.einsum("tkgd,skd->kgts", grouped, k, preferred_element_type=jnp.float32)
        logits = jnp.where(sees, logits * config.head_dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(logits, axis=-1)
        out = jnp.einsum("kgts,skd->tkgd", weights, v.astype(jnp.float32))
        return out.reshape(q.shape).astype(q.dtype)

    return attend

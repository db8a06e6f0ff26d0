"""Independent oracle: a dense decoder in NumPy without cache, batch or pages.

Written from the papers' formulas over the canonical weight tree, in float64, recomputing
everything for every token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.models.config import ModelConfig

Array = npt.NDArray[np.float64]


def _tree(params: Any) -> Any:
    if isinstance(params, dict):
        return {key: _tree(value) for key, value in params.items()}
    return np.asarray(params).astype(np.float64)


def _norm(x: Array, scale: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


class Oracle:
    """Logits of whole token sequences."""

    def __init__(self, config: ModelConfig, params: Any) -> None:
        self.config = config
        self.params = _tree(params)

    def logits(self, tokens: list[int]) -> Array:
        """`[len(tokens), vocab]`."""
        config, params = self.config, self.params
        x = params["embed"][np.asarray(tokens)]
        position = np.arange(len(tokens))
        angles = position[:, None] * config.rope.inv_freq(config.head_dim)
        cos = np.cos(angles) * config.rope.attention_scaling
        sin = np.sin(angles) * config.rope.attention_scaling

        def rotate(y: Array) -> Array:  # [T, D]
            half = y.shape[-1] // 2
            a, b = y[:, :half], y[:, half:]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

        group = config.num_heads // config.num_kv_heads
        for i in range(config.num_layers):
            layer = params["layers"][i]
            attn, mlp = layer["attn"], layer["mlp"]
            window = config.sliding_windows[i]
            sees = position[None, :] <= position[:, None]
            if window is not None:
                sees &= position[None, :] > position[:, None] - window
            h = _norm(x, layer["attn_norm"], config.rms_eps)
            out = np.zeros_like(x)
            for kv in range(config.num_kv_heads):
                heads = [attn["qkv"][kv, j] for j in range(group + 2)]
                rows = [h @ w.T for w in heads]
                if config.qkv_bias:
                    rows = [r + attn["qkv_bias"][kv, j] for j, r in enumerate(rows)]
                if config.qk_norm:
                    rows[:group] = [_norm(r, attn["q_norm"], config.rms_eps) for r in rows[:group]]
                    rows[group] = _norm(rows[group], attn["k_norm"], config.rms_eps)
                k, v = rotate(rows[group]), rows[group + 1]
                for g in range(group):
                    scores = rotate(rows[g]) @ k.T / np.sqrt(config.head_dim)
                    scores = np.where(sees, scores, -np.inf)
                    p = np.exp(scores - scores.max(-1, keepdims=True))
                    p /= p.sum(-1, keepdims=True)
                    out += (p @ v) @ attn["out"][:, kv, g].T
            x = x + out
            h = _norm(x, layer["mlp_norm"], config.rms_eps)
            gate, up = h @ mlp["gate_up"][:, 0].T, h @ mlp["gate_up"][:, 1].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ mlp["down"].T
        head = params["embed"] if config.tie_embeddings else params["head"]
        return _norm(x, params["norm"], config.rms_eps) @ head.T

    def logprobs(self, tokens: list[int]) -> Array:
        """Log-softmax of `logits`."""
        logits = self.logits(tokens)
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        """`count` greedy tokens, and the gap between the two best logits at each."""
        tokens, gaps = list(prompt), []
        for _ in range(count):
            last = self.logits(tokens)[-1]
            second, first = np.sort(last)[-2:]
            gaps.append(float(first - second))
            tokens.append(int(last.argmax()))
        return tokens[len(prompt) :], gaps


def assert_same_greedy(
    got: list[int], want: list[int], gaps: list[float], margin: float = 1e-3
) -> None:
    """Token ids are equal; a first difference is excused only where the gap is below `margin`."""
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            assert gaps[i] < margin, f"token {i}: {a} instead of {b}, with a gap of {gaps[i]}"
            return

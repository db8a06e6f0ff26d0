"""What the sampler should do, in NumPy and float64: by sorts, logarithms and chi-square."""

from __future__ import annotations

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-6
"""Probability with which right code fails a statistical test for a seed; seeds are fixed."""


def normal(seed: int, *shape: int, scale: float = 4.0) -> np.ndarray:
    """Normal logits."""
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def tied(rows: int, vocab: int, seed: int) -> np.ndarray:
    """Logits of few distinct values, the largest at both ends of blocks of 64 among others."""
    logits = np.random.default_rng(seed).integers(-3, 3, (rows, vocab)).astype(np.float32)
    logits[0] = 0.0
    logits[1, -1] = 9.0
    logits[2, [vocab // 2, vocab - 1]] = 9.0
    logits[3] = -np.inf
    logits[3, vocab - 1] = -5.0
    return logits


def hard_rows(seed: int, vocab: int) -> np.ndarray:
    """Eight rows: peaked, normal, flat, nearly and wholly uniform, one-hot and tied."""
    rng = np.random.default_rng(seed)
    logits = normal(seed, 8, vocab, scale=1.0) * np.array([[8, 4, 2, 1, 0.1, 0, 0, 0]]).T
    logits[5] = 3.0
    logits[6] = np.where(np.arange(vocab) == vocab // 3, 0, -np.inf)
    logits[7] = rng.integers(-6, 1, vocab)
    return logits.astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of each row."""
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))


def kept_weights(
    logits: np.ndarray,  # [vocab]
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Unnormalised probabilities of one row, zero for what its filters remove.

    By a sort; tokens that tie with the last one kept stay too.
    """
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    kept = (weights > 0) & (weights >= np.float32(min_p))
    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        kept &= logits >= logits[order[min(top_k, len(logits)) - 1]]
    if np.float32(top_p) < 1:
        mass = np.cumsum(np.where(kept, weights, 0.0)[order])
        last = order[np.argmax(mass >= np.float32(top_p) * mass[-1])]
        kept &= logits >= logits[last]
    return np.where(kept, weights, 0.0)


def chi_square(counts: np.ndarray, weights: np.ndarray) -> float:
    """Probability of counts at least as unlikely, rare categories taken together."""
    expected = weights / weights.sum() * counts.sum()
    rare = expected < 5
    got = [*counts[~rare], counts[rare].sum()]
    want = [*expected[~rare], expected[rare].sum()]
    if want[-1] == 0:
        assert got.pop() == 0
        want.pop()
    statistic = sum((g - w) ** 2 / w for g, w in zip(got, want, strict=True))
    return float(stats.chi2.sf(statistic, len(want) - 1)) if len(want) > 1 else 1.0

"""Top-k, top-p and min-p keep exactly what a sort in float64 keeps (B10, B12, B14)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.sampling import filters
from jaxserve.sampling.sums import PARTS
from tests.engine import distributions
from tests.engine.distributions import hard_rows
from tests.engine.test_draws import uniforms_of

SIZE = 4 * PARTS
ROWS = 8

_thresholds = jax.jit(filters.thresholds)
_weights = jax.jit(filters.kept_weights)


@functools.partial(jax.jit, static_argnames="limited")
def _draw(logits: Any, weights: Any, top_p: Any, uniforms: Any, limited: bool) -> jax.Array:
    return filters.draw_from_nucleus(
        logits,
        weights,
        top_p,
        jax.numpy.full(logits.shape[0], limited),
        lambda attempt: uniforms[attempt % uniforms.shape[0]],
    )


# Top-k and min-p


@pytest.mark.parametrize("vocab", [SIZE, 79 * PARTS])
@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 66, 200, SIZE - 1])
def test_the_threshold_is_the_kth_largest(vocab: int, k: int) -> None:
    """From the candidates, by bisection, and with both in one call."""
    for seed in range(3):
        logits = hard_rows(seed, vocab)
        want = np.sort(logits, -1)[:, -k]
        ks = np.full(ROWS, k, np.int32)
        everywhere = np.ones(ROWS, bool)
        assert np.array_equal(_thresholds(logits, ks, everywhere), want)
        ks[::2] = 130  # neighbours that need the bisection
        want[::2] = np.sort(logits, -1)[::2, -130]
        assert np.array_equal(_thresholds(logits, ks, everywhere), want)
        some = np.arange(ROWS) % 3 == 0
        assert np.array_equal(_thresholds(logits, ks, some), np.where(some, want, -np.inf))


def test_bisection_over_every_kind_of_float() -> None:
    """Signs, zeros of both signs, infinities and neighbouring floats."""
    one, tiny = np.float32(1), np.finfo(np.float32).tiny
    kinds = [np.inf, 3e38, np.nextafter(one, 2 * one), 1.0, np.nextafter(one, 0 * one), tiny, 0.0]
    row = np.array([*kinds, -0.0, -tiny, -1.0, -3e38, -np.inf], np.float32)
    ks = np.arange(1, len(row) + 1, dtype=np.int32)
    shuffled = np.random.default_rng(0).permutation(row)
    filled = np.pad(shuffled, (0, PARTS - len(row)), constant_values=-np.inf)
    rows = np.broadcast_to(filled, (len(row), PARTS))
    assert np.array_equal(jax.jit(filters.kth_largest)(rows, ks), row)


def weights_of(logits: np.ndarray, k: int = 0, min_p: float = 0, t: float = 1) -> np.ndarray:
    rows = len(logits)
    limited = np.full(rows, k > 0)
    threshold = _thresholds(logits, np.full(rows, max(k, 1), np.int32), limited)
    like = np.ones(rows, np.float32)
    return np.asarray(_weights(logits, t * like, threshold, min_p * like))


@pytest.mark.parametrize("temperature", [1e-12, 1e-3, 0.7, 1.0, 1.8, 2e3])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("k", [0, 1, 2, 17, 64, 65, SIZE - 1])
def test_weights_equal_a_sort(k: int, min_p: float, temperature: float) -> None:
    for seed in range(3):
        logits = hard_rows(seed, SIZE)
        got = weights_of(logits, k, min_p, temperature)
        for row in range(ROWS):
            want = distributions.kept_weights(logits[row], temperature, k, min_p=min_p)
            # Float32 has no weights below about 1e-38.
            normal_range = (want == 0) | (want > 1e-37)
            assert np.array_equal((got[row] > 0)[normal_range], (want > 0)[normal_range])
            # Exponents of up to 88 are rounded twice, each time by up to 2 ** -24 of themselves.
            np.testing.assert_allclose(got[row][normal_range], want[normal_range], rtol=2e-5)


def test_weights_without_filters_are_the_exponentials() -> None:
    logits = hard_rows(0, SIZE)
    want = np.asarray(jax.jit(jax.numpy.exp)(logits - logits.max(-1, keepdims=True)))
    assert np.array_equal(weights_of(logits).view(np.int32), want.view(np.int32))


# Top-p


def drawn_first(logits: np.ndarray, weights: np.ndarray, top_p: float) -> np.ndarray:
    """What each token of a row becomes if it is the first that is drawn: -1 if it cannot be.

    A token of the nucleus stays; any other is replaced by one that is.
    """
    # Uniforms have a resolution of 2 ** -23 of a column, and of the row.
    columns = weights.astype(np.float64).reshape(PARTS, -1)
    sums = columns.sum(0)
    share = np.minimum(columns / np.maximum(sums, 1e-300), sums / sums.sum())
    tokens = np.flatnonzero(share.ravel() > 1e-5)
    first = np.zeros((SIZE, 2))
    first[: len(tokens)] = [uniforms_of(weights, int(token)) for token in tokens]
    later = np.random.default_rng(0).random((15, SIZE, 2))
    result = _draw(
        np.broadcast_to(logits, (SIZE, SIZE)),
        np.broadcast_to(weights, (SIZE, SIZE)),
        np.full(SIZE, top_p, np.float32),
        np.concatenate([first[None], later]).astype(np.float32),
        limited=top_p < 1,
    )
    became = np.full(SIZE, -1)
    became[tokens] = np.asarray(result)[: len(tokens)]
    return became


@pytest.mark.parametrize("k", [0, 1, 5, 64, 65])
@pytest.mark.parametrize("p", [1e-46, 1e-9, 1e-4, 0.1, 0.5, 0.9, 0.999, 0.9999999, 1.0])
def test_the_nucleus_equals_a_sort(p: float, k: int) -> None:
    for seed in range(2):
        logits = hard_rows(seed, SIZE)
        weights = weights_of(logits, k)
        for row in range(ROWS):
            kept = distributions.kept_weights(logits[row], 1.0, k, p) > 0
            became = drawn_first(logits[row], weights[row], p)
            known = clear(weights[row], p)
            first = np.flatnonzero((became >= 0) & known)
            assert len(first) > 0
            assert np.array_equal(became[first] == first, kept[first])
            assert (kept | ~known)[became[first]].all()


def clear(weights: np.ndarray, p: float) -> np.ndarray:
    """Tokens that are in the nucleus or not by more than float32 sums can err."""
    wide = weights.astype(np.float64)
    above = np.array([wide[weights > w].sum() for w in weights])
    enough = float(np.float32(p)) * wide.sum()
    return (above == 0) | (np.abs(above - enough) > 1e-6 * enough)

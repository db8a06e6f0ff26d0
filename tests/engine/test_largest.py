"""The largest logits and their ids, whatever ties and whatever is not a number (B10, B22)."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxserve.sampling.largest import argmax, top_k
from tests.engine.distributions import normal, tied

ROWS = 8


@pytest.mark.parametrize("vocab", [1, 63, 64, 127, 128, 200, 257, 1000])
def test_argmax_takes_the_lowest_of_equal_logits(vocab: int) -> None:
    compiled = jax.jit(argmax)
    for seed in range(5):
        logits = tied(ROWS, vocab, seed)
        assert np.array_equal(compiled(logits), logits.argmax(-1))


def test_argmax_of_two_equal_logits_anywhere() -> None:
    """In one block, in neighbours, at the ends of the vocabulary."""
    vocab, compiled = 300, jax.jit(argmax)
    pairs = [(a, b) for a in range(0, vocab, 7) for b in range(a + 1, vocab, 13)]
    logits = normal(0, len(pairs), vocab, scale=1.0)
    for row, pair in zip(logits, pairs, strict=True):
        row[list(pair)] = 99.0
    assert np.array_equal(compiled(logits), [a for a, _ in pairs])


def test_argmax_of_rows_that_are_not_numbers_is_an_id() -> None:
    """A row without a largest logit neither fails nor changes the others."""
    logits = normal(1, ROWS, 200)
    want = logits.argmax(-1)
    logits[1], logits[2, 150], logits[3, 7], logits[4] = np.nan, np.nan, np.inf, -np.inf
    got = np.asarray(jax.jit(argmax)(logits))
    assert got[[0, 5, 6, 7]].tolist() == want[[0, 5, 6, 7]].tolist()
    assert got[1:5].tolist() == [0, 150, 7, 0]


@pytest.mark.parametrize(
    ("vocab", "k"),
    [(200, 3), (200, 4), (200, 5), (3, 5), (640, 10), (5, 0), (4096, 64), (4100, 64), (4100, 65)],
)
def test_top_k_equals_a_stable_sort(vocab: int, k: int) -> None:
    compiled = jax.jit(functools.partial(top_k, k=k))
    for seed in range(5):
        for logits in (tied(ROWS, vocab, seed), normal(seed, ROWS, vocab)):
            values, ids = map(np.asarray, compiled(logits))
            want = np.argsort(-logits, -1, kind="stable")[:, :k]
            found = want.shape[1]  # fewer than k in a small vocabulary
            assert values.shape == ids.shape == (ROWS, k)
            assert np.array_equal(ids[:, :found], want)
            assert np.array_equal(values[:, :found], np.take_along_axis(logits, want, 1))
            assert np.isneginf(values[:, found:]).all()

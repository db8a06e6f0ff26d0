"""Draws in proportion to weights: which index each uniform gives, and in what numbers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.sampling.draw import inverse_cdf
from jaxserve.sampling.sums import PARTS, row_sums
from tests.engine.distributions import FALSE_ALARM, chi_square

SIZE = 4 * PARTS

_inverse = jax.jit(inverse_cdf)


def inverse(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    return np.asarray(_inverse(weights.astype(np.float32), uniforms.astype(np.float32))[0])


def bit_reversal(n: int) -> np.ndarray:
    """Order in which halving takes the leaves of a power of two."""
    return np.array([0]) if n == 1 else np.concatenate([r := 2 * bit_reversal(n // 2), r + 1])


def middle(weights: np.ndarray, index: int) -> float:
    """The uniform at the middle of an index's share, shares in the order of `bit_reversal`."""
    width = 1 << (len(weights) - 1).bit_length()
    order = bit_reversal(width)
    padded = np.pad(weights.astype(np.float64), (0, width - len(weights)))[order]
    place = int(np.flatnonzero(order == index)[0])
    return float((padded[:place].sum() + padded[place] / 2) / padded.sum())


def uniforms_of(weights: np.ndarray, index: int) -> tuple[float, float]:
    """Uniforms that draw this index of a row."""
    columns = weights.reshape(PARTS, -1)
    part, column = divmod(index, columns.shape[1])
    return middle(columns.sum(0), column), middle(columns[:, column], part)


@pytest.mark.parametrize("size", [PARTS, SIZE, 5 * PARTS, 79 * PARTS])
def test_every_index_has_its_share(size: int) -> None:
    """The middle of an index's share of the uniforms draws it."""
    rng = np.random.default_rng(size)
    weights = (rng.random(size) * (rng.random(size) < 0.7)).astype(np.float32)
    some = np.flatnonzero(weights > 0.01)[: 4 * SIZE : 3]
    uniforms = np.array([uniforms_of(weights, i) for i in some])
    assert np.array_equal(inverse(np.broadcast_to(weights, (len(some), size)), uniforms), some)


@pytest.mark.parametrize("kind", ["flat", "skewed", "sparse"])
def test_indices_are_drawn_in_proportion_to_their_weights(kind: str) -> None:
    """Chi-square of 40,000 draws; see `FALSE_ALARM`."""
    rng = np.random.default_rng(3)
    weights = {
        "flat": rng.random(SIZE),
        "skewed": np.exp(rng.normal(0, 3, SIZE)),
        "sparse": np.where(rng.random(SIZE) < 0.1, rng.random(SIZE), 0),
    }[kind]
    rows, calls = 2000, 20
    counts = np.zeros(SIZE)
    for _ in range(calls):
        drawn = inverse(np.broadcast_to(weights, (rows, SIZE)), rng.random((rows, 2)))
        counts += np.bincount(drawn, minlength=SIZE)
    assert not counts[weights == 0].any()
    assert chi_square(counts, weights) > FALSE_ALARM


def test_an_index_without_weight_is_never_drawn() -> None:
    """At both ends of the uniforms, with whole columns and parts of no weight."""
    rng = np.random.default_rng(0)
    below_one = float(np.nextafter(np.float32(1), np.float32(0)))
    edges = np.array([0, 1e-45, 1e-30, 2.0**-24, 0.5, 1 - 2.0**-23, below_one], np.float32)
    uniforms = np.stack([a.ravel() for a in np.meshgrid(edges, edges)], 1)
    for trial in range(90):
        scaled = rng.normal(0, rng.choice([0, 1, 10, 40]), SIZE)
        weights = np.exp(scaled - scaled.max()).astype(np.float32)
        if trial % 3 == 0:
            weights.reshape(PARTS, -1)[:, rng.integers(0, 4)] = 0
            weights[: 2 * PARTS] = 0
        weights[rng.random(SIZE) < rng.choice([0, 0.5, 0.9])] = 0
        weights[rng.integers(0, SIZE)] = 1
        drawn = inverse(np.broadcast_to(weights, (len(uniforms), SIZE)), uniforms)
        assert (weights[drawn] > 0).all()


def test_a_row_without_any_weight_gives_an_index() -> None:
    drawn = inverse(np.zeros((3, SIZE)), np.array([[0.0, 0.0], [0.5, 0.5], [0.99, 0.99]]))
    assert drawn.tolist() == [0, 0, 0]


@pytest.mark.parametrize("size", [PARTS, 3 * PARTS, 79 * PARTS])
def test_sums_do_not_depend_on_the_number_of_rows(size: int) -> None:
    compiled = jax.jit(row_sums)
    x = np.random.default_rng(1).lognormal(0, 3, (64, size)).astype(np.float32)
    want = np.asarray(compiled(x))
    np.testing.assert_allclose(want, x.astype(np.float64).sum(-1), rtol=1e-6)
    for rows in (1, 2, 3, 5, 8, 16, 31):
        assert np.asarray(compiled(x[:rows])).tobytes() == want[:rows].tobytes()


def test_sums_never_shrink_when_a_number_grows() -> None:
    """What the nucleus relies on: more tokens above never hold less mass."""
    rng = np.random.default_rng(2)
    x = np.sort(rng.lognormal(0, 6, SIZE)).astype(np.float32)[rng.permutation(SIZE)]
    least = np.sort(x)[:, None]
    sums = np.asarray(jax.jit(row_sums)(np.where(x[None] >= least, x[None], 0)))
    assert (np.diff(sums) <= 0).all()

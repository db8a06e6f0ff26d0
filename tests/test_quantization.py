"""8-bit weights: how far codes and scales are from what they stand for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.quantization import GROUP, dequantize, quantize

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16
SHAPES = [(1, 1), (3, 31), (5, 64), (700, 576), (2, 2304)]
"""Fewer inputs than a group, parts of groups, more weights than one block."""


def random_weight(shape: tuple[int, int], seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(BF16)


def four_bits(shape: tuple[int, int], seed: int = 0) -> Array:
    """Sixteen numbers a group, evenly spaced: what dequantised Q4_1 files hold."""
    rng = np.random.default_rng(seed)
    groups = (shape[0], shape[1] // GROUP, 1)
    step, least = rng.uniform(0.01, 0.02, groups), rng.uniform(-0.2, -0.1, groups)
    levels = rng.integers(0, 16, (*groups[:2], GROUP))
    return (levels * step + least).reshape(shape).astype(BF16)


def repeated(scale: Array, inputs: int) -> Array:
    return np.repeat(scale.astype(np.float64), GROUP, axis=1)[:, :inputs]


def relative_error(weight: Array) -> float:
    codes, scale = quantize(weight)
    wide = weight.astype(np.float64)
    error = codes * repeated(scale, weight.shape[1]) - wide
    return float(np.sqrt((error**2).sum() / (wide**2).sum()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_weight_is_off_by_more_than_half_a_scale(shape: tuple[int, int]) -> None:
    weight = random_weight(shape)
    codes, scale = quantize(weight)
    assert codes.dtype == np.int8
    assert codes.shape == shape
    assert scale.dtype == BF16
    assert scale.shape == (shape[0], -(-shape[1] // GROUP))
    assert np.abs(codes.astype(int)).max() <= 127
    each = repeated(scale, shape[1])
    assert (np.abs(codes * each - weight.astype(np.float64)) <= each / 2).all()
    np.testing.assert_array_equal(dequantize(codes, scale), (codes * each).astype(BF16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_are_close_to_the_largest_magnitude(shape: tuple[int, int]) -> None:
    """At most 15 bfloat16 numbers above it, each at most a part in 128 larger."""
    weight = random_weight(shape)
    _, scale = quantize(weight)
    padded = np.pad(np.abs(weight.astype(np.float64)), ((0, 0), (0, -shape[1] % GROUP)))
    least = padded.reshape(shape[0], -1, GROUP).max(-1) / 127
    ratio = scale.astype(np.float64) / least
    assert ratio.min() >= 1 - 2**-8
    assert ratio.max() <= (1 + 2**-7) ** 16


def test_other_rows_and_groups_do_not_matter() -> None:
    weight = random_weight((600, 1000))
    codes, scale = quantize(weight)
    for row in (0, 261, 262, 599):
        alone = quantize(weight[row : row + 1, 64:128])
        np.testing.assert_array_equal(alone[0][0], codes[row, 64:128])
        np.testing.assert_array_equal(alone[1][0], scale[row, 2:4])


def test_weights_that_had_four_bits_keep_more_of_them() -> None:
    """A scale that meets their grid is found more often than not."""
    plain = np.sqrt(1 / 12)  # of a scale, if codes were anywhere between integers
    weight = four_bits((256, 576))
    _, scale = quantize(weight)
    by_chance = plain * np.sqrt((scale.astype(np.float64) ** 2).mean())
    by_chance /= np.sqrt((weight.astype(np.float64) ** 2).mean())
    assert relative_error(weight) < 0.75 * by_chance
    assert relative_error(random_weight((256, 576))) < 0.005


def test_quantising_again_changes_next_to_nothing() -> None:
    """What `LLM.params` gives can be given back to `update_weights`."""
    weight = dequantize(*quantize(random_weight((256, 576))))
    again = dequantize(*quantize(weight))
    assert (again != weight).mean() < 0.01
    difference = (again.astype(np.float64) - weight.astype(np.float64)).std()
    assert difference < 1e-3 * weight.astype(np.float64).std()


def test_zeros_stay_zeros() -> None:
    weight = random_weight((4, 96))
    weight[1], weight[2, 32:64] = 0, 0
    codes, scale = quantize(weight)
    assert not codes[1].any()
    assert not scale[1].any()
    assert scale[2].astype(bool).tolist() == [True, False, True]
    assert not dequantize(codes, scale)[2, 32:64].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_its_group_alone(bad: float) -> None:
    weight = random_weight((3, 96))
    clean = dequantize(*quantize(weight))
    weight[1, 40] = bad
    got = dequantize(*quantize(weight)).astype(np.float64)
    assert not np.isfinite(got[1, 40])
    got[1, 32:64] = clean[1, 32:64]
    np.testing.assert_array_equal(got, clean.astype(np.float64))


@pytest.mark.parametrize("size", [1e-38, 1e-40, 1e-30, 1e30, 3e38])
def test_the_ends_of_the_range(size: float) -> None:
    weight = (np.linspace(-1, 1, 64)[None] * size).astype(BF16)
    got = dequantize(*quantize(weight)).astype(np.float64)
    assert np.abs(got - weight.astype(np.float64)).max() <= max(size / 100, 1e-40)

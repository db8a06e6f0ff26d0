"""Products of the CPU kernels with packed weights: right, exact where they can be, row by row."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from jaxserve.quantization import dequantize, quantize
from pallas_kernels.cpu import ops, packing
from tests.kernels.cpu_kernels import ALL, need

Array = npt.NDArray[Any]
SHAPES = [(96, 64), (50, 80), (33, 576), (40, 2304)]
"""Outputs and inputs: whole panels, parts of panels and steps, more steps than one block."""
ROWS = [*range(1, 65), 256]

each_set = pytest.mark.parametrize("name", ALL)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_type = pytest.mark.parametrize("grouped", [False, True], ids=["bf16", "int8"])


class Case:
    """Weights in both forms, as the kernels and as NumPy have them."""

    def __init__(self, shape: tuple[int, int], grouped: bool, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        outputs, inputs = self.outputs, self.inputs = shape
        self.whole = rng.standard_normal(shape).astype(jnp.bfloat16)
        self.packed = packing.pack(self.whole)
        if grouped:
            codes, scale = quantize(self.whole)
            self.whole = dequantize(codes, scale)
            self.packed = packing.pack_groups(codes, scale)
        self.numbers = self.whole.astype(np.float64)
        self.x = rng.standard_normal((max(ROWS), inputs)).astype(np.float32)
        self.gain = rng.uniform(0.5, 1.5, inputs).astype(jnp.bfloat16)
        self.residual = rng.standard_normal((max(ROWS), outputs)).astype(np.float32)

    def normed(self, rows: int, eps: float = 1e-5) -> Array:
        x = self.x[:rows].astype(np.float64)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * self.gain.astype(np.float64)


def used(x: Any) -> Array:
    """All rows of `x`."""
    return np.int32(len(x))


def error(got: Any, want: Array) -> float:
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


@each_shape
def test_packing_moves_every_element_and_back(shape: tuple[int, int]) -> None:
    case = Case(shape, grouped=False)
    assert case.packed.shape[1] % 16 == 0
    assert (packing.unpack(case.packed, *shape) == case.whole).all()
    codes, scale = quantize(case.whole)
    packed = packing.pack_groups(codes, scale)
    assert packed.nbytes == case.packed.nbytes * 17 // 32
    back, back_scale = packing.unpack_groups(packed, *shape, scale.dtype)
    assert (back == codes).all()
    assert (back_scale == scale).all()


@pytest.mark.parametrize("width", [16, 20, 48])
def test_interleaving_is_undone(width: int) -> None:
    gate_up = np.arange(width * 2 * 3).reshape(width, 2, 3)
    rows = packing.interleave(gate_up)
    assert (rows[:16] == gate_up[:16, 0]).all()
    assert (rows[16:32][: min(16, width)] == gate_up[:16, 1]).all()
    assert (packing.separate(rows, width) == gate_up).all()


@each_set
@each_type
@each_shape
def test_products_against_numpy(name: str, grouped: bool, shape: tuple[int, int]) -> None:
    """Weights of 8 bits are products with what they stand for, rounded to bfloat16."""
    case, kernels, rows = Case(shape, grouped), need(name), 37
    x = case.x[:rows].astype(jnp.bfloat16)
    got = ops.linear(kernels, x, used(x), case.packed, case.outputs)
    assert got.dtype == jnp.float32
    assert error(got, x.astype(np.float64) @ case.numbers.T) < 1e-5
    rounded = ops.linear(kernels, x, used(x), packing.pack(case.whole), case.outputs)
    np.testing.assert_array_equal(got, rounded)
    residual = case.residual[:rows]
    added = ops.linear_add(kernels, x, used(x), case.packed, residual)
    np.testing.assert_array_equal(added, np.asarray(got) + residual)
    normed = ops.norm_linear(
        kernels, case.x[:rows], used(case.x[:rows]), case.gain, 1e-5, case.packed, case.outputs
    )
    assert error(normed, case.normed(rows) @ case.numbers.T) < 1e-2
    token, most = ops.norm_argmax(
        kernels, case.x[:rows], used(case.x[:rows]), case.gain, 1e-5, case.packed, case.outputs
    )
    np.testing.assert_array_equal(token, np.asarray(normed).argmax(-1))
    np.testing.assert_array_equal(most, np.asarray(normed).max(-1))
    words = np.random.default_rng(3).integers(-(2**31), 2**31, (rows, -(-case.outputs // 32)))
    words[5] = 0  # nothing is allowed
    bits = (words[:, :, None] >> np.arange(32)) & 1
    held = np.where(bits.reshape(rows, -1)[:, : case.outputs] == 1, normed, -np.inf)
    token, most = ops.norm_argmax(
        kernels,
        case.x[:rows],
        used(case.x[:rows]),
        case.gain,
        1e-5,
        case.packed,
        case.outputs,
        words.astype(np.int32),
    )
    np.testing.assert_array_equal(most, held.max(-1))
    some = np.isfinite(held.max(-1))
    assert not some[5]
    np.testing.assert_array_equal(token[some], held.argmax(-1)[some])
    numbers = np.array([0, case.outputs - 1, 7, case.outputs + 5, -3], np.int32)
    picked = ops.weight_rows(kernels, numbers, case.packed, case.outputs, case.inputs)
    clipped = case.numbers[np.clip(numbers, 0, case.outputs - 1)]
    np.testing.assert_allclose(picked, clipped, rtol=2**-8 if grouped else 0)


@each_set
@each_type
def test_gated_product(name: str, grouped: bool) -> None:
    kernels, rows, width = need(name), 21, 40
    case = Case((2 * width, 96), grouped)
    rows_of_panels = packing.interleave(case.whole.reshape(width, 2, 96))
    packed = packing.pack(rows_of_panels)
    if grouped:
        packed = packing.pack_groups(*quantize(rows_of_panels))
    got = ops.norm_swiglu(
        kernels, case.x[:rows], used(case.x[:rows]), case.gain, 1e-5, packed, width
    )
    products = (case.normed(rows) @ case.numbers.T).reshape(rows, width, 2)
    gate, up = products[..., 0], products[..., 1]
    assert got.dtype == jnp.bfloat16
    assert error(got, gate / (1 + np.exp(-gate)) * up) < 2e-2


@each_set
@each_type
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str, grouped: bool) -> None:
    case, kernels = Case((50, 176), grouped), need(name)
    tail = (case.gain, 1e-5, case.packed)
    everything = _all_products(case, kernels, tail, max(ROWS))
    for rows in ROWS:
        for got, want in zip(_all_products(case, kernels, tail, rows), everything, strict=True):
            assert np.array_equal(got, want[:rows])


def _all_products(case: Case, kernels: str, tail: tuple[Any, ...], rows: int) -> list[Array]:
    x, narrow = case.x[:rows], case.x[:rows].astype(jnp.bfloat16)
    gated = ops.norm_swiglu(kernels, x, used(x), *tail, case.packed.shape[0] * 16)
    return [
        np.asarray(ops.linear(kernels, narrow, used(narrow), case.packed, case.outputs)),
        np.asarray(ops.norm_linear(kernels, x, used(x), *tail, case.outputs)),
        np.asarray(gated).view(np.uint16),
        *map(np.asarray, ops.norm_argmax(kernels, x, used(x), *tail, case.outputs)),
    ]


@each_set
def test_the_lowest_of_equal_outputs_is_taken(name: str) -> None:
    case, kernels = Case((70, 64), grouped=False), need(name)
    signs = np.sign(case.whole[3].astype(np.float32))
    weight = case.whole.copy()
    weight[[3, 17, 40, 69]] = signs * 100
    gain = np.ones(64, jnp.bfloat16)
    token, _ = ops.norm_argmax(
        kernels, signs[None], used(signs[None]), gain, 1e-5, packing.pack(weight), 70
    )
    assert token.tolist() == [3]


@each_set
def test_the_lowest_of_equal_outputs_is_taken_whoever_computes_it(name: str) -> None:
    """Workers take panels from both ends of a share, so that later columns may come first."""
    kernels, signs = need(name), np.ones((1, 64), np.float32)
    weight = np.zeros((3200, 64), jnp.bfloat16)
    weight[[133, 700, 1650, 3199]] = 1
    packed, gain = packing.pack(weight), np.ones(64, jnp.bfloat16)
    call = jax.jit(lambda x: ops.norm_argmax(kernels, x, used(x), gain, 1e-5, packed, 3200)[0])
    assert {int(call(signs)[0]) for _ in range(200)} == {133}


@each_set
@each_type
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_says_so_and_harms_no_other(
    name: str, grouped: bool, bad: float
) -> None:
    case, kernels = Case((50, 80), grouped), need(name)
    x = case.x[:9].copy()
    x[4, 7] = bad
    tail = (case.gain, 1e-5, case.packed, case.outputs)
    clean = ops.norm_argmax(kernels, case.x[:9], used(case.x[:9]), *tail)
    token, most = ops.norm_argmax(kernels, x, used(x), *tail)
    others = np.arange(9) != 4
    assert not np.isfinite(most[4])
    assert 0 <= int(token[4]) < 50
    np.testing.assert_array_equal(np.asarray(token)[others], np.asarray(clean[0])[others])
    np.testing.assert_array_equal(np.asarray(most)[others], np.asarray(clean[1])[others])
    logits = np.asarray(ops.norm_linear(kernels, x, used(x), *tail))
    assert not np.isfinite(logits[4]).any()
    assert np.isfinite(logits[others]).all()


@each_set
@each_type
def test_only_the_rows_in_use_are_computed(name: str, grouped: bool) -> None:
    case, kernels = Case((96, 80), grouped), need(name)
    x, few = case.x[:40], np.int32(7)
    tail = (case.gain, 1e-5, case.packed, case.outputs)
    whole = ops.norm_linear(kernels, x, used(x), *tail)
    part = ops.norm_linear(kernels, x, few, *tail)
    np.testing.assert_array_equal(part[:7], whole[:7])
    tokens, most = ops.norm_argmax(kernels, x, few, *tail)
    np.testing.assert_array_equal(tokens[:7], np.asarray(whole)[:7].argmax(-1))
    assert not np.asarray(tokens)[7:].any()
    assert not np.asarray(most)[7:].any()
    none = ops.norm_argmax(kernels, x, np.int32(0), *tail)
    assert not np.asarray(none[0]).any()


def test_calls_of_several_threads_at_once() -> None:
    """Only one has the helpers; the others do their work alone."""
    name = next((n for n in ALL if _available(n)), None)
    if name is None:
        pytest.skip("no CPU kernels here")
    case = Case((512, 96), grouped=False)
    x = jnp.asarray(case.x[:64], jnp.bfloat16)
    call = jax.jit(lambda x, w: ops.linear(name, x, used(x), w, case.outputs))
    want = np.asarray(call(x, case.packed))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: np.asarray(call(x, case.packed)), range(200)))
    assert all(np.array_equal(got, want) for got in results)


def test_more_workers_than_cores() -> None:
    """Their turns are then as uneven as they can be: shares are taken over, helpers come late."""
    if not any(map(_available, ALL)):
        pytest.skip("no CPU kernels here")
    chosen = "lowest_of_equal or several_threads"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", __file__, "-k", chosen]
    environment = {**os.environ, "PJRT_NPROC": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def _available(name: str) -> bool:
    try:
        need(name)
    except pytest.skip.Exception:
        return False
    return True

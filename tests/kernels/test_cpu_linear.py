"""Products of the CPU kernels with packed weights: right, exact where they can be, row by row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from pallas_kernels.cpu import ops, packing
from tests.kernels.cpu_kernels import ALL, need

Array = npt.NDArray[Any]
SHAPES = [(96, 64), (50, 80), (33, 576), (40, 2304)]
"""Outputs and inputs: whole panels, parts of panels and steps, more steps than one block."""
ROWS = [*range(1, 65), 256]

each_set = pytest.mark.parametrize("name", ALL)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_type = pytest.mark.parametrize("eight_bit", [False, True], ids=["bf16", "int8"])


class Case:
    """Weights in both forms, as the kernels and as NumPy have them."""

    def __init__(self, shape: tuple[int, int], eight_bit: bool, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        outputs, inputs = self.outputs, self.inputs = shape
        self.extra: tuple[Array, ...] = ()
        if eight_bit:
            whole = rng.integers(-127, 128, shape).astype(np.int8)
            padding = (0, -outputs % packing.PANEL)
            self.scale = rng.uniform(0.001, 0.01, outputs).astype(np.float32)
            offsets = -128 * whole.sum(1, dtype=np.int32)
            self.extra = (np.pad(self.scale, padding), np.pad(offsets, padding))
            self.numbers = whole * self.scale[:, None].astype(np.float64)
        else:
            whole = rng.standard_normal(shape).astype(jnp.bfloat16)
            self.numbers = whole.astype(np.float64)
        self.whole = whole
        self.packed = packing.pack(whole)
        self.x = rng.standard_normal((max(ROWS), inputs)).astype(np.float32)
        self.gain = rng.uniform(0.5, 1.5, inputs).astype(jnp.bfloat16)
        self.residual = rng.standard_normal((max(ROWS), outputs)).astype(np.float32)

    @property
    def weights(self) -> tuple[Array, tuple[Array, ...]]:
        return self.packed, self.extra

    def normed(self, rows: int, eps: float = 1e-5) -> Array:
        x = self.x[:rows].astype(np.float64)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * self.gain.astype(np.float64)


def eight_bits(x: Array) -> Array:
    """Rows rounded to 8 bits, and back."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    return np.rint(x * (1 / scale)).astype(np.float64) * scale


def error(got: Any, want: Array) -> float:
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


@each_type
@each_shape
def test_packing_moves_every_element_and_back(shape: tuple[int, int], eight_bit: bool) -> None:
    case = Case(shape, eight_bit)
    assert case.packed.shape[1] % 16 == 0
    assert (packing.unpack(case.packed, *shape) == case.whole).all()


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
def test_products_against_numpy(name: str, eight_bit: bool, shape: tuple[int, int]) -> None:
    """8-bit weights meet rows of 8 bits, whose sums are exact."""
    case, kernels, rows = Case(shape, eight_bit), need(name), 37
    x = case.x[:rows].astype(jnp.bfloat16)
    met = eight_bits(x) if eight_bit else x.astype(np.float64)
    want = met @ case.numbers.T
    got = ops.linear(kernels, x, *case.weights, case.outputs)
    assert got.dtype == jnp.float32
    assert error(got, want) < (1e-6 if eight_bit else 1e-5)
    residual = case.residual[:rows]
    added = ops.linear_add(kernels, x, *case.weights, residual)
    np.testing.assert_array_equal(added, np.asarray(got) + residual)
    normed = ops.norm_linear(kernels, case.x[:rows], case.gain, 1e-5, *case.weights, case.outputs)
    assert error(normed, case.normed(rows) @ case.numbers.T) < (2e-2 if eight_bit else 1e-2)
    token, most = ops.norm_argmax(
        kernels, case.x[:rows], case.gain, 1e-5, *case.weights, case.outputs
    )
    np.testing.assert_array_equal(token, np.asarray(normed).argmax(-1))
    np.testing.assert_array_equal(most, np.asarray(normed).max(-1))
    numbers = np.array([0, case.outputs - 1, 7, case.outputs + 5, -3], np.int32)
    picked = ops.weight_rows(kernels, numbers, *case.weights, case.outputs, case.inputs)
    clipped = case.numbers[np.clip(numbers, 0, case.outputs - 1)]
    np.testing.assert_allclose(picked, clipped, rtol=1e-6)


@each_set
@each_type
def test_gated_product(name: str, eight_bit: bool) -> None:
    kernels, rows, width = need(name), 21, 40
    case = Case((2 * width, 96), eight_bit)
    gate_up = case.whole.reshape(width, 2, 96)
    packed = packing.pack(packing.interleave(gate_up))
    extra: tuple[Array, ...] = ()
    if eight_bit:
        scale = packing.interleave(case.scale.reshape(width, 2))
        extra = (scale, -128 * packing.interleave(gate_up).sum(1, dtype=np.int32))
    got = ops.norm_swiglu(kernels, case.x[:rows], case.gain, 1e-5, packed, extra, width)
    products = (case.normed(rows) @ case.numbers.T).reshape(rows, width, 2)
    gate, up = products[..., 0], products[..., 1]
    assert got.dtype == jnp.bfloat16
    assert error(got, gate / (1 + np.exp(-gate)) * up) < 2e-2


@each_set
@each_type
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str, eight_bit: bool) -> None:
    case, kernels = Case((50, 176), eight_bit), need(name)
    tail = (case.gain, 1e-5, *case.weights)
    everything = _all_products(case, kernels, tail, max(ROWS))
    for rows in ROWS:
        for got, want in zip(_all_products(case, kernels, tail, rows), everything, strict=True):
            assert np.array_equal(got, want[:rows])


def _all_products(case: Case, kernels: str, tail: tuple[Any, ...], rows: int) -> list[Array]:
    x, narrow = case.x[:rows], case.x[:rows].astype(jnp.bfloat16)
    gated = ops.norm_swiglu(kernels, x, *tail, case.packed.shape[0] * 16)
    return [
        np.asarray(ops.linear(kernels, narrow, *case.weights, case.outputs)),
        np.asarray(ops.norm_linear(kernels, x, *tail, case.outputs)),
        np.asarray(gated).view(np.uint16),
        *map(np.asarray, ops.norm_argmax(kernels, x, *tail, case.outputs)),
    ]


@each_set
def test_eight_bit_sums_are_exact_on_every_instruction_set(name: str) -> None:
    """The largest magnitudes, where 16-bit products would saturate."""
    inputs, kernels = 2304, need(name)
    weight = np.full((32, inputs), -127, np.int8)
    weight[::2] = 127
    x = np.ones((5, inputs), jnp.bfloat16)
    x[1] = -1
    offsets = -128 * weight.sum(1, dtype=np.int32)
    extra = (np.ones(32, np.float32), offsets)
    got = np.asarray(ops.linear(kernels, x, packing.pack(weight), extra, 32))
    scale = np.float32(1) / np.float32(127)
    want = (x.astype(np.float32) @ weight.astype(np.float32).T * 127).astype(np.float32) * scale
    np.testing.assert_allclose(got, want, rtol=1e-6)


@each_set
@each_type
def test_the_lowest_of_equal_outputs_is_taken(name: str, eight_bit: bool) -> None:
    case, kernels = Case((70, 64), eight_bit), need(name)
    case.whole[[3, 17, 40, 69]] = case.whole[[3, 3, 3, 3]] = np.sign(case.whole[3]) * 100
    extra: tuple[Array, ...] = ()
    if eight_bit:
        scale = np.pad(np.full(70, 0.01, np.float32), (0, 26))
        extra = (scale, np.pad(-128 * case.whole.sum(1, dtype=np.int32), (0, 26)))
    x = np.sign(case.whole[3].astype(np.float32))[None]
    gain = np.ones(64, jnp.bfloat16)
    token, _ = ops.norm_argmax(kernels, x, gain, 1e-5, packing.pack(case.whole), extra, 70)
    assert token.tolist() == [3]


@each_set
@each_type
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_says_so_and_harms_no_other(
    name: str, eight_bit: bool, bad: float
) -> None:
    case, kernels = Case((50, 80), eight_bit), need(name)
    x = case.x[:9].copy()
    x[4, 7] = bad
    tail = (case.gain, 1e-5, *case.weights, case.outputs)
    clean = ops.norm_argmax(kernels, case.x[:9], *tail)
    token, most = ops.norm_argmax(kernels, x, *tail)
    others = np.arange(9) != 4
    assert not np.isfinite(most[4])
    assert 0 <= int(token[4]) < 50
    np.testing.assert_array_equal(np.asarray(token)[others], np.asarray(clean[0])[others])
    np.testing.assert_array_equal(np.asarray(most)[others], np.asarray(clean[1])[others])
    logits = np.asarray(ops.norm_linear(kernels, x, *tail))
    assert not np.isfinite(logits[4]).any()
    assert np.isfinite(logits[others]).all()


def test_calls_of_several_threads_at_once() -> None:
    """Only one has the helpers; the others do their work alone."""
    import concurrent.futures

    name = next((n for n in ALL if _available(n)), None)
    if name is None:
        pytest.skip("no CPU kernels here")
    case = Case((512, 96), eight_bit=False)
    x = jnp.asarray(case.x[:64], jnp.bfloat16)
    call = jax.jit(lambda x, w: ops.linear(name, x, w, (), case.outputs))
    want = np.asarray(call(x, case.packed))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: np.asarray(call(x, case.packed)), range(200)))
    assert all(np.array_equal(got, want) for got in results)


def _available(name: str) -> bool:
    try:
        need(name)
    except pytest.skip.Exception:
        return False
    return True

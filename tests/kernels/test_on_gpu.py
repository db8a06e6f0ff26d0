"""The Triton kernels on a GPU, held to the checks of the interpreted ones."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.kernels.paged import Config, Form, expected, random_case
from tests.kernels.test_attention import (
    HALF,
    INT8,
    KERNEL,
    WINDOWED,
    answers,
    cases,
    check_equals_the_oracle,
    named,
    poisoned,
)
from tests.kernels.test_invariance import check_poison
from tests.kernels.test_kv_write import ROWS, Way, check_cells

pytestmark = pytest.mark.gpu

FORMS = [Form(split, "gpu", "pallas_triton") for split in (True, False)]


@pytest.fixture(autouse=True)
def _on_a_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("there is no GPU")


@named([(config, form) for config in KERNEL for form in FORMS])
def test_equals_the_oracle(config: Config, form: Form) -> None:
    rng = np.random.default_rng(0)
    for case, want in answers(config, form.split):
        check_equals_the_oracle(config, form, case, want)
    for _ in range(50):
        case = poisoned(random_case(config, form.split, rng), np.nan)
        check_equals_the_oracle(config, form, case, expected(config, case))


@named([(config, form) for config in (WINDOWED, HALF, INT8) for form in FORMS])
def test_not_a_bit_depends_on_cells_that_no_sequence_owns(config: Config, form: Form) -> None:
    for case in cases(config, form.split):
        check_poison(config, form, case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_cells_and_no_other_bit_for_bit(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        slots = rng.permutation(48)[:ROWS]
        slots[rng.random(ROWS) < 0.3] = -1
        check_cells(Way("pallas_triton", "gpu", dtype), slots.astype(np.int32))

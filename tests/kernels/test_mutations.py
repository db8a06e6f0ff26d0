"""Each rule of the kernels that a test guards is taken away, and that test's check must fail.

The checks are those of the tests named here, unchanged; what is changed is a seam of the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pallas_kernels import ragged, triton
from pallas_kernels._triton import load
from tests.kernels import paged, test_kv_write
from tests.kernels.paged import CHUNK_KERNEL, DECODE_KERNEL, Config, Form, build
from tests.kernels.test_attention import HALF, WINDOWED, answers, check_equals_the_oracle
from tests.kernels.test_invariance import cases, check_poison
from tests.kernels.test_kv_write import Way, check_cells
from tests.kernels.test_lowering import LLAMA, check_written_over

WAY = Way("pallas_interpret", "cpu", "float32")


@pytest.fixture(autouse=True)
def _compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled of the right kernel is used, and nothing of the wrong one is kept."""
    for name in ("attention", "write"):
        monkeypatch.setattr(triton, name, _without_jit(getattr(triton, name)))
    monkeypatch.setattr(paged, "compiled", functools.cache(build))
    monkeypatch.setattr(test_kv_write, "compiled", functools.cache(test_kv_write.build))


def _without_jit(operation: Any) -> Callable[..., Any]:
    def traced_again(*arguments: Any, **options: Any) -> Any:
        return operation.__wrapped__(*arguments, **options)

    return traced_again


def oracle(config: Config, form: Form) -> None:
    """`test_equals_the_oracle`."""
    for case, want in answers(config, form.split):
        check_equals_the_oracle(config, form, case, want)


def poison(config: Config, form: Form) -> None:
    """`test_not_a_bit_depends_on_cells_that_no_sequence_owns`."""
    for case in cases(config, form.split):
        check_poison(config, form, case)


def write() -> None:
    """`test_the_right_cells_and_no_other_bit_for_bit`."""
    check_cells(WAY, np.arange(test_kv_write.ROWS, dtype=np.int32))


def in_place() -> None:
    """`test_a_write_is_one_launch_over_the_donated_pages`."""
    check_written_over(LLAMA, 64, rotate=True)


MUTATIONS: dict[str, tuple[Any, str, Callable[..., Any], list[Callable[[], None]]]] = {
    "masked cells are not zeroed": (
        ragged,
        "load_cells",
        lambda cells, index, mask, layout: layout.as_cells(load(cells, index, mask)),
        [functools.partial(poison, HALF, form) for form in (DECODE_KERNEL, CHUNK_KERNEL)],
    ),
    "an item has no upper end": (
        ragged,
        "inside",
        lambda position, lo, hi: position >= lo,
        [
            functools.partial(poison, HALF, DECODE_KERNEL),
            functools.partial(oracle, HALF, DECODE_KERNEL),
        ],
    ),
    "every item counts the sink": (
        triton,
        "sinks_of_items",
        lambda sinks, options: sinks,
        [functools.partial(oracle, WINDOWED, DECODE_KERNEL)],
    ),
    "the pages are not written over": (
        triton,
        "written_over",
        lambda others, leaves: {},
        [write, in_place],
    ),
}


@pytest.mark.parametrize("rule", MUTATIONS)
def test_a_kernel_without_the_rule_fails_the_check(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, mutant, checks = MUTATIONS[rule]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, mutant)
        for check in checks:
            with pytest.raises(AssertionError):
                check()


@pytest.mark.parametrize("rule", MUTATIONS)
def test_the_kernel_with_the_rule_passes_it(rule: str) -> None:
    """Under the same fixture: it is the mutation that fails above."""
    for check in MUTATIONS[rule][-1]:
        check()

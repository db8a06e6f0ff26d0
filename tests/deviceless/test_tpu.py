"""Attention and whole steps compiled by libtpu for chips that are not there."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.deviceless import tpu
from tests.deviceless.gpu import in_child

pytestmark = pytest.mark.skipif(tpu.missing() is not None, reason=str(tpu.missing()))
each_chip = pytest.mark.parametrize("chip", [*tpu.TARGETS])
TIMEOUT_S = 300
ON_XLA = {"int8-decode", "int8-chunk", "sinks-decode"}
"""What the in-tree kernel cannot do."""


@functools.cache
def attention(chip: str) -> dict[str, Any]:
    arguments = ("tests.deviceless.attention_alone", "tpu", chip)
    seen: dict[str, Any] = in_child(*arguments, timeout_s=TIMEOUT_S, **tpu.WITHOUT_TPU)
    return seen


@each_chip
def test_one_kernel_reads_the_cache_that_was_written_in_place(chip: str) -> None:
    for name, case in attention(chip).items():
        if name in ON_XLA:
            continue
        assert (case["attention"], case["kernel_calls"]) == ("tpu", 1), name
        assert case["alias_bytes"] == case["cache_bytes"], name
        assert case["temp_bytes"] < 24 << 20, name  # the queries of 2048 rows are 16 MiB
        assert not case["copies"], name


@each_chip
def test_what_the_kernel_cannot_do_is_plain_xla_that_copies_no_cache_either(chip: str) -> None:
    for name in ON_XLA:
        case = attention(chip)[name]
        assert (case["attention"], case["kernel_calls"]) == ("xla", 0), name
        # Scales of a token's heads are padded to a whole row.
        assert case["cache_bytes"] <= case["alias_bytes"] < 1.01 * case["cache_bytes"], name
        # XLA gathers the next pages of all sequences, and makes float32 of quantised ones.
        assert case["temp_bytes"] < case["cache_bytes"], name
        assert not case["copies"], name


def check_step(chip: str, model: str, num_devices: int) -> None:
    """A step of 32 decode rows and 512 chunk rows: two kernels per layer, one donated cache."""
    sizes = (model, "32", "512", str(num_devices))
    arguments = ("tests.deviceless.engine_step", "tpu", chip, *sizes)
    step = in_child(*arguments, timeout_s=TIMEOUT_S, **tpu.WITHOUT_TPU)
    assert step["attention"] == "tpu"
    assert step["kernel_calls"] == 2 * step["layers"]
    # Rows of the carry that are no whole tiles are padded.
    assert step["donated_bytes"] <= step["alias_bytes"] < 1.01 * step["donated_bytes"]
    assert step["temp_bytes"] < step["layer_bytes"] / 2
    assert not step["copies"]


@each_chip
@pytest.mark.parametrize("model", ["smollm2-135m", "llama3-8b-2-layers"])
def test_a_step_of_the_engine_keeps_its_state_where_it_is(chip: str, model: str) -> None:
    check_step(chip, model, num_devices=1)


def test_so_does_one_over_four_chips() -> None:
    check_step("v5e", "llama3-8b-2-layers", num_devices=4)

"""The Triton kernels and whole steps compiled by XLA:GPU for a chip that is not there."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.deviceless import gpu

pytestmark = pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))
TIMEOUT_S = 300


@functools.cache
def attention(chip: str) -> dict[str, Any]:
    arguments = ("tests.deviceless.attention_alone", "gpu", chip)
    seen: dict[str, Any] = gpu.in_child(*arguments, timeout_s=TIMEOUT_S)
    return seen


@pytest.mark.parametrize("chip", ["a100", "h100", "b200"])
def test_kernels_read_the_cache_that_one_of_them_wrote_in_place(chip: str) -> None:
    for name, case in attention(chip).items():
        assert case["attention"] == "pallas_triton", name
        # The write and the chunk form, or the write, the split form and its combination.
        assert case["kernel_calls"] == (3 if name.endswith("decode") else 2), name
        assert case["alias_bytes"] == case["cache_bytes"], name
        assert case["temp_bytes"] < 24 << 20, name
        assert not case["copies"], name


@pytest.mark.parametrize("model", ["smollm2-135m", "llama3-8b-2-layers"])
@pytest.mark.parametrize("chunk", [0, 512])
def test_a_step_of_the_engine_keeps_its_state_where_it_is(model: str, chunk: int) -> None:
    """32 decode rows, with and without chunk rows, on an H100."""
    arguments = ("tests.deviceless.engine_step", "gpu", "h100", model, "32", str(chunk), "1")
    step = gpu.in_child(*arguments, timeout_s=TIMEOUT_S)
    assert step["attention"] == "pallas_triton"
    assert step["kernel_calls"] == (4 if chunk else 3) * step["layers"]
    assert step["alias_bytes"] == step["donated_bytes"]
    assert step["temp_bytes"] < step["layer_bytes"] / 2
    assert not step["copies"]

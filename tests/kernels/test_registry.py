"""Implementations by name, and what they and the public operations refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    KVLayout,
    Use,
    choose,
    implementations,
    kv_write,
    make_plan,
    ragged_paged_attention,
)

LAYOUT = KVLayout(np.dtype(np.float32), num_kv_heads=2, head_dim=8, page_size=4, platform="cpu")
GPU = KVLayout(np.dtype(jnp.bfloat16), num_kv_heads=8, head_dim=128, page_size=16, platform="gpu")
INT8, FP8 = np.dtype(np.int8), np.dtype(jnp.float8_e4m3fn)


def on(platform: str) -> Use:
    return Use(replace(GPU, platform=platform))


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_auto_finds_one_for_every_platform(platform: str) -> None:
    chosen = choose("auto", on(platform))
    assert platform in chosen.automatic
    assert choose(chosen.name, on(platform)) == chosen


def test_auto_prefers_the_kernels_where_they_can_serve() -> None:
    assert choose("auto", Use(GPU)).name == "pallas_triton"
    assert choose("auto", Use(replace(GPU, page_size=8))).name == "xla"
    assert choose("auto", Use(GPU, compute_capability=(7, 5))).name == "xla"
    assert choose("auto", on("cpu")).name == "xla"


def test_what_is_interpreted_is_never_chosen_for_speed() -> None:
    assert not implementations()["pallas_interpret"].automatic
    assert not implementations()["reference"].automatic


def test_an_implementation_may_be_named() -> None:
    for name in ("xla", "reference", "pallas_triton", "pallas_interpret"):
        assert choose(name, Use(GPU)).name == name


def test_an_unknown_name_is_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match=r"no attention implementation 'cuda'; known are .*xla"):
        choose("cuda", Use(GPU))


def test_a_platform_it_does_not_run_on_is_refused() -> None:
    with pytest.raises(ValueError, match="'pallas_triton' runs on gpu, not on cpu"):
        choose("pallas_triton", on("cpu"))
    with pytest.raises(ValueError, match="'pallas_interpret' runs on cpu and gpu, not on tpu"):
        choose("pallas_interpret", on("tpu"))


@pytest.mark.parametrize("name", ["pallas_triton", "pallas_interpret"])
@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"head_dim": 16}, "takes head_dim from 32 to 256, not 16"),
        ({"head_dim": 288}, "takes head_dim from 32 to 256, not 288"),
        ({"head_dim": 65}, "takes an even head_dim, not 65"),
        ({"page_size": 8}, "takes page sizes from 16 to 128, not 8"),
        ({"page_size": 256}, "takes page sizes from 16 to 128, not 256"),
        ({"page_size": 48}, "takes page sizes that are powers of two, not 48"),
        ({"dtype": np.dtype(np.float64)}, "takes float16, bfloat16 and float32, not float64"),
    ],
)
def test_the_kernels_name_the_limit_of_a_layout(
    name: str, changes: dict[str, Any], limit: str
) -> None:
    with pytest.raises(ValueError, match=f"attention implementation '{name}' {limit}"):
        choose(name, Use(replace(GPU, **changes)))


@pytest.mark.parametrize(
    ("quantized", "capability", "limit"),
    [
        (None, (7, 5), "needs compute capability 8.0, not 7.5"),
        (INT8, (7, 0), "needs compute capability 8.0, not 7.0"),
        (FP8, (8, 0), "needs compute capability 8.9 for float8_e4m3fn pages, not 8.0"),
        (FP8, (8, 6), "needs compute capability 8.9 for float8_e4m3fn pages, not 8.6"),
    ],
)
def test_the_kernels_name_the_limit_of_a_chip(
    quantized: np.dtype | None, capability: tuple[int, int], limit: str
) -> None:
    with pytest.raises(ValueError, match=f"'pallas_triton' {limit}"):
        choose("pallas_triton", Use(replace(GPU, quantized=quantized), 1, False, capability))


@pytest.mark.parametrize(
    ("quantized", "capability"),
    [(None, (8, 0)), (INT8, (8, 0)), (FP8, (8, 9)), (FP8, (9, 0)), (FP8, (12, 0)), (FP8, None)],
)
@pytest.mark.parametrize("head_dim", [32, 80, 96, 256])
@pytest.mark.parametrize("page_size", [16, 128])
def test_the_kernels_take_everything_within_the_limits(
    quantized: np.dtype | None, capability: tuple[int, int] | None, head_dim: int, page_size: int
) -> None:
    layout = replace(GPU, head_dim=head_dim, page_size=page_size, quantized=quantized)
    use = Use(layout, group=3, sinks=True, compute_capability=capability)
    assert choose("pallas_triton", use).name == "pallas_triton"


def attend(**changes: Any) -> None:
    plan = make_plan(jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32), num_items=1, block_q=1)
    arguments: dict[str, Any] = {
        "q": jnp.zeros((2, 4, 8)),
        "pages": LAYOUT.abstract(3),
        "block_tables": jnp.zeros((2, 1), jnp.int32),
        "kv_lens": jnp.zeros(2, jnp.int32),
        "cu_q_lens": jnp.zeros(3, jnp.int32),
        "plan": plan,
        "layout": LAYOUT,
        "sm_scale": 1.0,
        "split": True,
        "block_q": 1,
        "block_kv": 4,
    }
    ragged_paged_attention(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((2, 4, 16))}, "head_dim 16, the cache has 8"),
        ({"q": jnp.zeros((2, 3, 8))}, "3 query heads are not a multiple of 2 KV heads"),
        ({"cu_q_lens": jnp.zeros(4, jnp.int32)}, "query lengths of 3 .* differ"),
        ({"block_tables": jnp.zeros((3, 1), jnp.int32)}, "block tables of 3 differ"),
        ({"sinks": jnp.zeros(3)}, r"sinks \(3,\) are not one for each of 4 query heads"),
        ({"block_kv": 6}, "block_kv=6 is neither a multiple nor a divisor of page_size=4"),
        ({"implementation": "nope"}, "no attention implementation 'nope'"),
        ({"implementation": "pallas_interpret"}, "takes head_dim from 32 to 256, not 8"),
    ],
)
def test_attention_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v": jnp.zeros((2, 1, 8))}, r"k \(2, 2, 8\), v \(2, 1, 8\) .* do not fit"),
        ({"slots": jnp.zeros(3, jnp.int32)}, r"slots \(3,\) do not fit"),
        ({"cos": jnp.zeros((2, 4))}, "cos and sin must be given together"),
        ({"sin": jnp.zeros((2, 4))}, "cos and sin must be given together"),
        ({"implementation": "nope"}, "no attention implementation 'nope'"),
        ({"implementation": "pallas_interpret"}, "takes head_dim from 32 to 256, not 8"),
    ],
)
def test_kv_write_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "k": jnp.zeros((2, 2, 8)),
        "v": jnp.zeros((2, 2, 8)),
        "slots": jnp.zeros(2, jnp.int32),
        "pages": LAYOUT.abstract(3),
        "layout": LAYOUT,
    }
    with pytest.raises(ValueError, match=message):
        kv_write(**{**arguments, **changes})

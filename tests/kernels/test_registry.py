"""Implementations by name, and what the public operations refuse."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVLayout, choose, implementations, kv_write, ragged_paged_attention

LAYOUT = KVLayout(np.dtype(np.float32), num_kv_heads=2, head_dim=8, page_size=4, platform="cpu")


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_auto_finds_one_for_every_platform(platform: str) -> None:
    chosen = choose("auto", platform)
    assert platform in chosen.platforms
    assert choose(chosen.name, platform) == chosen


def test_an_implementation_may_be_named() -> None:
    assert [choose(name, "cpu").name for name in implementations()] == list(implementations())
    assert "xla" in implementations()


def test_an_unknown_name_is_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match=r"no attention implementation 'cuda'; known are .*xla"):
        choose("cuda", "gpu")


def attend(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "q": jnp.zeros((2, 4, 8)),
        "cache": jnp.zeros(LAYOUT.shape(3)),
        "block_tables": jnp.zeros((2, 1), jnp.int32),
        "kv_lens": jnp.zeros(2, jnp.int32),
        "cu_q_lens": jnp.zeros(3, jnp.int32),
        "plan": None,
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
        ({"block_kv": 6}, "block_kv=6 is not a multiple of page_size=4"),
        ({"split": False}, "needs a plan"),
        ({"implementation": "nope"}, "no attention implementation 'nope'"),
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
    ],
)
def test_kv_write_refuses_what_does_not_fit(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "k": jnp.zeros((2, 2, 8)),
        "v": jnp.zeros((2, 2, 8)),
        "slots": jnp.zeros(2, jnp.int32),
        "cache": jnp.zeros(LAYOUT.shape(3)),
        "layout": LAYOUT,
    }
    with pytest.raises(ValueError, match=message):
        kv_write(**{**arguments, **changes})

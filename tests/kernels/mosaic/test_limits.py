"""What the Mosaic GPU kernels do not take is refused in words, before anything is traced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVLayout, mosaic
from pallas_kernels.registry import Use, choose, implementations
from tests.kernels.mosaic.llama_8b import Decode

LAYOUT = KVLayout(np.dtype(jnp.bfloat16), 8, 128, 16, "gpu")
LLAMA_8B = Use(LAYOUT, group=4, sinks=True, compute_capability=(9, 0))
OLD = jax.__version_info__ < (0, 11)
needs_new_jax = pytest.mark.skipif(OLD, reason=f"needs JAX 0.11, not {jax.__version__}")


def changed(capability: tuple[int, int] | None = (9, 0), group: int = 4, **layout: Any) -> Use:
    return Use(dataclasses.replace(LAYOUT, **layout), group, False, capability)


def test_auto_does_not_choose_it() -> None:
    assert implementations()["pallas_mgpu"].automatic == ()


def test_an_older_jax_is_named() -> None:
    reason = mosaic.refusal(LLAMA_8B)
    assert reason == (f"needs JAX 0.11 or later, not {jax.__version__}" if OLD else None)


@needs_new_jax
@pytest.mark.parametrize(
    "use",
    [
        changed(None),
        changed((8, 0)),
        changed((8, 0), head_dim=64, page_size=32),
        changed((10, 0), group=32),
        changed(dtype=np.dtype(np.float16), head_dim=256, group=16),
        changed(head_dim=64, group=1, page_size=128),
    ],
    ids=str,
)
def test_what_it_takes(use: Use) -> None:
    assert choose("pallas_mgpu", use).name == "pallas_mgpu"


@needs_new_jax
@pytest.mark.parametrize(
    ("use", "words"),
    [
        (changed((7, 5)), "needs compute capability 8.0 or higher, not 7.5"),
        (changed(dtype=np.dtype(np.float32)), "takes bfloat16 and float16, not float32"),
        (changed(quantized=np.dtype(np.int8)), "takes 16-bit pages, not int8"),
        (
            changed(quantized=np.dtype(jnp.float8_e4m3fn)),
            "takes 16-bit pages, not float8_e4m3fn",
        ),
        (changed(head_dim=96), "takes head_dim 64, 128, 256, not 96"),
        (changed(head_dim=512), "takes head_dim 64, 128, 256, not 512"),
        (changed(page_size=8), "takes page sizes 16, 32, 64, 128, not 8"),
        (changed(page_size=48), "takes page sizes 16, 32, 64, 128, not 48"),
        (changed(group=33), "takes up to 32 query heads per KV head, not 33"),
        (changed(group=17, head_dim=256), "takes up to 16 query heads per KV head, not 17"),
        (
            changed((8, 6), head_dim=64),
            "takes page sizes from 32 with head_dim 64 on compute capability 8.6, not 16",
        ),
        (changed(platform="cpu"), "runs on gpu, not on cpu"),
    ],
    ids=str,
)
def test_what_it_refuses(use: Use, words: str) -> None:
    with pytest.raises(ValueError, match=f"'pallas_mgpu' {words}"):
        choose("pallas_mgpu", use)


@needs_new_jax
def test_more_rows_than_the_registers_hold_are_refused() -> None:
    call = Decode(block_q=9)
    with pytest.raises(ValueError, match=r"up to 32 query heads .* not 4 in each of 9 rows"):
        jax.eval_shape(call, *call.arguments())

"""Attention and cache writes of the CPU kernels, as an implementation of the registry.

See `src/attention.h` for the arithmetic.  The kernels plan their own work: plans and block sizes
of the common interface are not looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.layout import CPULayout
from pallas_kernels.cpu.library import is_loaded, target
from pallas_kernels.layout import KVLayout, KVPages
from pallas_kernels.plan import Plan
from pallas_kernels.rows import rotate_half

_LANES = 16


def attention(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    plan: Plan | None,
    sinks: jax.Array | None,
    options: Any,
    *,
    kernels: str,
) -> jax.Array:
    """See `pallas_kernels.attention.ragged_paged_attention`."""
    del plan
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    call = jax.ffi.ffi_call(target(kernels, "attention"), out)
    extra = () if sinks is None else (sinks.astype(jnp.float32),)
    attended: jax.Array = call(
        q, pages.cells, block_tables, kv_lens, cu_q_lens, *extra, **_softmax(options)
    )
    return attended


def write(
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    pages: KVPages,
    layout: KVLayout,
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    kernels: str,
) -> KVPages:
    """See `pallas_kernels.attention.kv_write`."""
    del layout
    if cos is not None and sin is not None:
        k = rotate_half(k, cos, sin)
    like = jax.ShapeDtypeStruct(pages.cells.shape, pages.cells.dtype)
    call = jax.ffi.ffi_call(target(kernels, "write"), like, input_output_aliases={3: 0})
    rows = (k.astype(jnp.float32), v.astype(jnp.float32))
    return KVPages(call(*rows, slots, pages.cells))


def rotate_write_attend(
    qkv: jax.Array,
    used: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slots: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    decode_lens: jax.Array,
    chunk_kv_lens: jax.Array,
    chunk_cu_lens: jax.Array,
    sinks: jax.Array | None,
    options: Any,
    *,
    kernels: str,
) -> tuple[jax.Array, KVPages]:
    """See `pallas_kernels.registry.Fused`."""
    rows, kv_heads, parts, head_dim = qkv.shape
    out = (
        jax.ShapeDtypeStruct((rows, kv_heads * (parts - 2), head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct(pages.cells.shape, pages.cells.dtype),
    )
    name = target(kernels, "rotate_write_attend")
    call = jax.ffi.ffi_call(name, out, input_output_aliases={9: 1})
    operands = (qkv, used, cos, sin, slots, block_tables, decode_lens, chunk_kv_lens, chunk_cu_lens)
    extra = () if sinks is None else (sinks.astype(jnp.float32),)
    attended, cells = call(*operands, pages.cells, *extra, **_softmax(options))
    return attended, KVPages(cells)


def refusal(use: Any, *, kernels: str) -> str | None:
    """The limit that a use exceeds."""
    layout = use.layout
    if not is_loaded(kernels):
        return "is not built: it needs a C++ compiler and a CPU with its instructions"
    if layout.quantized is not None or layout.dtype != np.dtype(jnp.bfloat16):
        return f"reads bfloat16 pages, not {layout.cell_dtype}"
    for name in ("head_dim", "page_size"):
        if getattr(layout, name) % _LANES:
            return f"needs a {name} that is a multiple of {_LANES}, not {getattr(layout, name)}"
    return None


def forms(kernels: str) -> dict[str, Any]:
    """The functions of one instruction set, as fields of an `Implementation`."""
    functions: dict[str, Callable[..., Any]] = {
        "attention": attention,
        "write": write,
        "fused": rotate_write_attend,
        "refusal": refusal,
    }
    return {name: partial(function, kernels=kernels) for name, function in functions.items()}


def _softmax(options: Any) -> dict[str, Any]:
    return {
        "scale": np.float32(options.sm_scale),
        "soft_cap": np.float32(options.soft_cap or 0),
        "window": np.int32(options.window or 0),
    }


__all__ = ["CPULayout", "attention", "forms", "refusal", "rotate_write_attend", "write"]

"""Kernel that writes a token's keys and values into its cell: rotated, quantised, in place.

One program per token, all KV heads at once.  A key is handled as two halves, which rotary
embedding mixes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._triton import load_or_zero, store
from pallas_kernels.layout import KVLayout, KVPages
from pallas_kernels.quantize import scale_of, to_cells
from pallas_kernels.tuning import Launch, power_of_two

LAUNCH = Launch(num_warps=4, num_stages=1)


def kernel(
    slots: Any,
    k: Any,
    v: Any,
    angles: tuple[Any, Any] | None,  # cosines and sines of each row
    old: KVPages,
    *out: Any,  # the leaves of the new pages, which are the old ones
    layout: KVLayout,
) -> None:
    """The program of row `program_id(0)`."""
    del old
    row = pl.program_id(0)
    slot = slots[row]

    @pl.when(slot >= 0)
    def _() -> None:
        place = (lax.div(slot, layout.page_size), lax.rem(slot, layout.page_size))
        half = layout.head_dim // 2
        first, second = _load(k, row, 0, half), _load(k, row, half, half)
        if angles is not None:
            first, second = _rotated(first, second, row, angles)
        _write(out, 0, [(0, first), (half, second)], place, half, layout)
        whole = layout.head_dim
        _write(out, 1, [(0, _load(v, row, 0, whole))], place, whole, layout)


def _load(ref: Any, row: Any, start: int, size: int) -> jax.Array:  # [heads, lanes]
    head, lane, real = _elements(ref.shape[1], size)
    return load_or_zero(ref, (row, head, start + lane), real)


def _elements(heads: int, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Heads, elements of a head, and which of both are real."""
    head = jnp.arange(power_of_two(heads), dtype=jnp.int32)[:, None]
    lane = jnp.arange(power_of_two(size), dtype=jnp.int32)[None, :]
    return head, lane, (head < heads) & (lane < size)


def _rotated(
    first: jax.Array, second: jax.Array, row: Any, angles: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    half = angles[0].shape[1]
    lane = jnp.arange(power_of_two(half), dtype=jnp.int32)
    cos, sin = (load_or_zero(ref, (row, lane), lane < half)[None, :] for ref in angles)
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    return (a * cos - b * sin).astype(first.dtype), (b * cos + a * sin).astype(first.dtype)


def _write(
    out: tuple[Any, ...],
    part: int,
    pieces: list[tuple[int, jax.Array]],
    place: tuple[Any, Any],
    size: int,
    layout: KVLayout,
) -> None:
    """Keys (part 0) or values (part 1) of a token, in pieces of `size` elements of each head."""
    page, cell = place
    heads = out[0].shape[2]
    head, lane, real = _elements(heads, size)
    if layout.quantized is not None:
        pieces = [(start, x.astype(jnp.float32)) for start, x in pieces]
        largest = functools.reduce(jnp.maximum, [jnp.abs(x).max(1) for _, x in pieces])
        scale = scale_of(largest, layout.quantized)
        store(out[1], (page, part, head[:, 0], cell), scale, head[:, 0] < heads)
        pieces = [(start, to_cells(x, scale[:, None], layout.quantized)) for start, x in pieces]
    for start, x in pieces:
        element = start + lane
        if lane.size > size:  # masked lanes must not be another piece's
            element = jnp.where(lane < size, element, layout.head_dim)
        cells = layout.as_stored(x.astype(layout.cell_dtype))
        store(out[0], (page, part, head, cell, element), cells, real)

"""Kernel that joins the states of a row's work items and finishes its attention (split-KV).

One program per row and query head, so that rows of no sequence are written too, as zeros.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import softmax
from pallas_kernels._triton import load_or_zero, store
from pallas_kernels.softmax import MASK, State
from pallas_kernels.tuning import Launch, power_of_two

LAUNCH = Launch(num_warps=4, num_stages=2)
_ITEMS = 16
"""Work items joined at once."""


def kernel(
    start: Any,  # i32[rows], first work item of each row
    count: Any,  # i32[rows], its work items, 0 for a row of no active sequence
    token: Any,  # i32[rows], its place among its sequence's query tokens
    parts: tuple[Any, Any, Any],  # a `State` [items, kv_heads, live rows, ...]
    sinks: Any,
    out: Any,
    *,
    group: int,
) -> None:
    """The program of query row `program_id(0)` and query head `program_id(1)`."""
    row, head = pl.program_id(0), pl.program_id(1)
    head_dim = out.shape[-1]
    lane = jnp.arange(power_of_two(head_dim), dtype=jnp.int32)
    real = lane < head_dim
    items = count[row]
    of_row = (lax.div(head, group), token[row] * group + lax.rem(head, group))

    def join(i: jax.Array, state: State) -> State:
        rank = i * _ITEMS + jnp.arange(_ITEMS, dtype=jnp.int32)
        live = rank < items
        item = start[row] + rank
        index, every = (item, *of_row), live[:, None] & real[None, :]
        largest = jnp.where(live, load_or_zero(parts[1], index, live), MASK)
        weight = load_or_zero(parts[2], index, live)
        total = load_or_zero(parts[0], (item[:, None], *of_row, lane[None, :]), every)
        state = softmax.rescaled(state, jnp.maximum(state.largest, largest.max(0)))
        share = jnp.exp2(largest - state.largest)
        return State(
            state.total + (total * share[:, None]).sum(0),
            state.largest,
            state.weight + (weight * share).sum(0),
        )

    steps = lax.div(items + _ITEMS - 1, _ITEMS)
    state = lax.fori_loop(0, steps, join, softmax.no_keys((), lane.size))
    if sinks is not None:
        state = softmax.with_sink(state, sinks[head])
    answer = softmax.attention(state).astype(out.dtype)
    store(out, (row, head, lane), answer, real)

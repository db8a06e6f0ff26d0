"""The second kernel of `mosaic_decode`: the work items of a sequence become its attention.

Items are added in the plan's order, whatever else the step holds, so a sequence's bits do not
depend on its neighbours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_decode import (
    Partials,
    Refs,
    Sizes,
    across_rows,
    interpreted,
    plgpu,
    start_state,
    store,
)
from pallas_kernels.plan import Plan
from pallas_kernels.softmax import LOG2E, State


def combine(
    partials: Partials,
    plan: Plan,
    sinks: jax.Array | None,  # f32[kv_heads, columns]
    sizes: Sizes,
) -> jax.Array:  # [seqs, kv_heads, head_dim, columns]
    """Normalised sum of each sequence's work items; a sink joins here, once, as one more weight.

    Columns without a key hold anything.
    """

    def paged_combine(*refs: Refs) -> None:
        *inputs, out = refs
        _combine(sizes, _Memory(out, *inputs))

    grid = (plan.start.shape[0], partials.total.shape[1])
    kernel = plgpu.kernel(
        paged_combine,
        out_type=jax.ShapeDtypeStruct((*grid, sizes.head_dim, sizes.columns), sizes.dtype),
        grid=grid,
        grid_names=("seq", "head"),
        **interpreted(sizes.interpret),
    )
    extra = () if sinks is None else (sinks * LOG2E,)
    return kernel(plan.start, plan.count, *partials, *extra)


class _Memory(NamedTuple):
    """The kernel's references."""

    out: Refs
    start: Refs
    count: Refs
    total: Refs
    largest: Refs
    weight: Refs
    sinks: Refs = None


def _combine(sizes: Sizes, memory: _Memory) -> None:
    seq, head = lax.axis_index("seq"), lax.axis_index("head")
    column = sizes.accumulator.reduce(0)
    first = memory.start[seq]

    def read(ref: Refs, layout: Any) -> Any:
        return plgpu.load(ref, layout=layout, optimized=False)

    def add(i: Any, state: State) -> State:
        item = State(
            read(memory.total.at[first + i, head], sizes.accumulator),
            read(memory.largest.at[first + i, head], column),
            read(memory.weight.at[first + i, head], column),
        )
        return _joined(state, item)

    state = lax.fori_loop(0, memory.count[seq], add, start_state(sizes))
    if memory.sinks is not None:
        sink = read(memory.sinks.at[head], column)
        state = _joined(state, State(jnp.zeros_like(state.total), sink, jnp.ones_like(sink)))
    mean = state.total / across_rows(state.weight, state.total)
    store(memory.out.at[seq, head], mean.astype(sizes.dtype))


def _joined(a: State, b: State) -> State:
    """Two softmaxes over different keys as one over all of them."""
    largest = jnp.maximum(a.largest, b.largest)
    scale_a, scale_b = jnp.exp2(a.largest - largest), jnp.exp2(b.largest - largest)
    total = a.total * across_rows(scale_a, a.total) + b.total * across_rows(scale_b, b.total)
    return State(total, largest, a.weight * scale_a + b.weight * scale_b)

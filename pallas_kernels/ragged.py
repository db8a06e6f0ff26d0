"""Kernel of attention over pages: a work item's query rows against its run of keys.

One body, two uses.  With `split` each program leaves the state of its rows, for `combine` to
join; without, an item has all keys of its rows and the program finishes them.  Does not know how
the work was listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import softmax
from pallas_kernels._triton import SMALLEST_PRODUCT, load, load_or_zero, product, store
from pallas_kernels.layout import KVLayout, KVPages
from pallas_kernels.quantize import FP8
from pallas_kernels.registry import AttentionOptions
from pallas_kernels.softmax import LOG2E, MASK, State
from pallas_kernels.tuning import power_of_two


@dataclass(frozen=True)
class Shape:
    """Static sizes of the kernel."""

    options: AttentionOptions
    group: int
    """Query heads per KV head."""

    @property
    def live_rows(self) -> int:
        """Rows of a block of queries: each token with every head of the group."""
        return self.options.block_q * self.group

    @property
    def rows(self) -> int:
        """`live_rows` as a product takes them."""
        return max(SMALLEST_PRODUCT, power_of_two(self.live_rows))

    @property
    def lanes(self) -> int:
        """`head_dim` as Triton holds it."""
        return power_of_two(self.options.layout.head_dim)


class Queries(NamedTuple):
    """The rows of one program."""

    q: jax.Array  # [rows, lanes]
    place: tuple[jax.Array, jax.Array, jax.Array]  # of each element in the array of all queries
    row: jax.Array  # i32[rows]
    head: jax.Array  # i32[rows], the query head
    position: jax.Array  # i32[rows]
    live: jax.Array  # bool[rows]


def kernel(
    items: tuple[Any, Any, Any, Any],  # seq, q0, lo and hi of a plan
    tables: Any,
    kv_lens: Any,
    cu_q_lens: Any,
    q: Any,
    pages: KVPages,
    sinks: Any,  # of the query heads, if they join here
    *out: Any,  # with `split` the state's three arrays [items, kv_heads, live rows, ...], or q's
    shape: Shape,
) -> None:
    """The program of work item `program_id(0)` and KV head `program_id(1)`."""
    item, kv_head = pl.program_id(0), pl.program_id(1)
    seq = items[0][item]

    @pl.when(seq >= 0)
    def _() -> None:
        q0, lo, hi = (ref[item] for ref in items[1:])
        queries = _load_queries(q, cu_q_lens, kv_lens, seq, q0, kv_head, shape)
        block_kv = shape.options.block_kv
        first, last = lax.div(lo, block_kv), lax.div(hi + block_kv - 1, block_kv)

        def block(i: jax.Array, state: State) -> State:
            position = i * block_kv + jnp.arange(block_kv, dtype=jnp.int32)
            mine = inside(position, lo, hi)
            place = _places(tables, seq, position, mine, shape)
            return _attend(state, queries, pages, place, kv_head, position, mine, shape)

        state = lax.fori_loop(first, last, block, softmax.no_keys((shape.rows,), shape.lanes))
        if sinks is not None:
            sink = load_or_zero(sinks, (queries.head,), queries.live)
            state = softmax.with_sink(state, sink)
        if shape.options.split:
            _store_state(out, state, (item, kv_head), queries, shape)
        else:
            answer = softmax.attention(state).astype(q.dtype)
            store(out[0], queries.place, answer, _all_lanes(queries.live, shape))


def inside(position: jax.Array, lo: jax.Array, hi: jax.Array) -> jax.Array:
    """The keys that are the item's: no other is read, not even its page's number."""
    return (position >= lo) & (position < hi)


def load_cells(cells: Any, index: tuple[Any, ...], mask: jax.Array, layout: KVLayout) -> jax.Array:
    """Cells, zeros where masked: a weight of zero is not enough, for 0 * NaN is NaN.

    That holds for values of keys that are not seen, and for lanes of keys past `head_dim`.
    """
    if cells.dtype != FP8:
        return layout.as_cells(load_or_zero(cells, index, mask))
    return jnp.where(mask, load(cells, index, mask).astype(layout.dtype), 0)


def _load_queries(
    q: Any, cu_q_lens: Any, kv_lens: Any, seq: Any, q0: Any, kv_head: Any, shape: Shape
) -> Queries:
    first = cu_q_lens[seq]
    q_len = cu_q_lens[seq + 1] - first
    row = jnp.arange(shape.rows, dtype=jnp.int32)
    token = q0 + lax.div(row, shape.group)
    head = kv_head * shape.group + lax.rem(row, shape.group)
    live = (row < shape.live_rows) & (token < q_len)
    at = jnp.where(live, first + token, q.shape[0])
    place = (at[:, None], head[:, None], _lane(shape))
    values = load_or_zero(q, place, _all_lanes(live, shape))
    return Queries(values, place, row, head, kv_lens[seq] - q_len + token, live)


def _places(
    tables: Any, seq: Any, position: jax.Array, mine: jax.Array, shape: Shape
) -> tuple[jax.Array, jax.Array]:
    """Page and cell within it of each key.

    The table is read once per key and not once per page: threads of one address share a load,
    while spreading page numbers over keys would move them through shared memory.
    """
    page_size = shape.options.layout.page_size
    page = load_or_zero(tables, (seq, lax.div(position, page_size)), mine)
    return page, lax.rem(position, page_size)


def _attend(
    state: State,
    queries: Queries,
    pages: KVPages,
    place: tuple[jax.Array, jax.Array],
    kv_head: Any,
    position: jax.Array,
    mine: jax.Array,
    shape: Shape,
) -> State:
    """The state after one more block of keys."""
    page, cell = place
    dtype = queries.q.dtype
    index = (kv_head, cell[:, None], _lane(shape))
    every = _all_lanes(mine, shape)
    layout = shape.options.layout
    k = load_cells(pages.cells, (page[:, None], 0, *index), every, layout).astype(dtype)
    v = load_cells(pages.cells, (page[:, None], 1, *index), every, layout).astype(dtype)
    logits = product(queries.q, k, axis=1)
    if pages.scales is not None:
        logits *= load_or_zero(pages.scales, (page, 0, kv_head, cell), mine)[None, :]
    keep = _seen(queries.position, position, mine, shape)
    logits = jnp.where(keep, _in_base_2(logits, shape), MASK)
    state = softmax.rescaled(state, jnp.maximum(state.largest, logits.max(1)))
    weights = jnp.where(keep, jnp.exp2(logits - state.largest[:, None]), 0.0)
    weight = state.weight + weights.sum(1)
    if pages.scales is not None:
        weights *= load_or_zero(pages.scales, (page, 1, kv_head, cell), mine)[None, :]
    total = state.total + product(weights.astype(dtype), v, axis=0)
    return State(total, state.largest, weight)


def _seen(
    row_position: jax.Array, position: jax.Array, mine: jax.Array, shape: Shape
) -> jax.Array:  # bool[rows or 1, block_kv]
    """Which keys each row sees."""
    keep = mine[None, :]
    if shape.options.block_q == 1:  # an item's bounds are those of its one token
        return keep
    keep &= position[None, :] <= row_position[:, None]
    if shape.options.window is not None:
        keep &= position[None, :] > row_position[:, None] - shape.options.window
    return keep


def _in_base_2(products: jax.Array, shape: Shape) -> jax.Array:
    scale, cap = shape.options.sm_scale, shape.options.soft_cap
    if cap is None:
        return products * (scale * LOG2E)
    return jnp.tanh(products * (scale / cap)) * (cap * LOG2E)


def _store_state(
    out: tuple[Any, ...], state: State, index: tuple[Any, Any], queries: Queries, shape: Shape
) -> None:
    total, largest, weight = out
    by_row = (*index, queries.row)
    store(
        total,
        (*index, queries.row[:, None], _lane(shape)),
        state.total,
        _all_lanes(queries.live, shape),
    )
    store(largest, by_row, state.largest, queries.live)
    store(weight, by_row, state.weight, queries.live)


def _lane(shape: Shape) -> jax.Array:  # i32[1, lanes]
    return jnp.arange(shape.lanes, dtype=jnp.int32)[None, :]


def _all_lanes(rows: jax.Array, shape: Shape) -> jax.Array:  # bool[rows, 1 or lanes]
    """Mask of the elements of some rows; without the lanes past `head_dim`, if there are any."""
    mask = rows[:, None]
    if shape.lanes == shape.options.layout.head_dim:
        return jnp.broadcast_to(mask, (rows.size, shape.lanes))
    return mask & (_lane(shape) < shape.options.layout.head_dim)

"""Split-KV decode attention on Pallas Mosaic GPU, for NVIDIA GPUs from Ampere on.

One warpgroup takes one work item of the plan for one KV head: a run of keys of a sequence.  It
leaves the unnormalised softmax of that run, and `mosaic_combine` merges the runs.

The keys are the rows of the matrix products and the query heads, padded to a multiple of 8, the
columns: `S^T = K Q^T` and `O^T = V^T P^T`.  So 64 keys fill the tensor cores although a decode
step has few queries, and maxima and sums run along the rows.

Blocks of keys are copied `num_stages` ahead of their use: by TMA, which signals a barrier for
each, on Hopper and later; by `cp.async`, which counts copies, on Ampere and Ada.  Needs JAX 0.11.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.layout import NULL_PAGE
from pallas_kernels.plan import Plan
from pallas_kernels.softmax import LOG2E, MASK, State

# Typed as in the oldest version of JAX, which lacks half of it.
plgpu: Any = mosaic_gpu

Refs = Any
"""References of a kernel's arguments, results and scratch memory."""


@dataclass(frozen=True)
class Sizes:
    """What is static in the kernel."""

    dtype: np.dtype
    head_dim: int
    page_size: int
    group: int
    """Query heads of a KV head."""
    block_q: int
    """Query tokens of a work item."""
    block_kv: int
    num_stages: int
    """Blocks of keys in flight at once."""
    sm_scale: float
    window: int | None
    soft_cap: float | None
    tma: bool
    """Whether the chip copies by TMA; by `cp.async` otherwise."""
    interpret: Any = None
    """Parameters of the interpreter that runs the kernel on a CPU; `None` compiles it."""

    @property
    def columns(self) -> int:
        """Query heads of an item, token by token, padded to what the matrix unit takes."""
        return -(-self.block_q * self.group // 8) * 8

    @property
    def copy_rows(self) -> int:
        """Keys of one copy: within one page and within one block."""
        return min(self.page_size, self.block_kv)

    @property
    def copies(self) -> int:
        """Copies that fill a block of keys, and again one of values."""
        return self.block_kv // self.copy_rows

    @property
    def accumulator(self) -> Any:
        """How the four warps hold a product."""
        return plgpu.Layout.MMA_ACC(self.dtype)


class Partials(NamedTuple):
    """The softmax of each work item over its own keys, in base 2, before normalisation.

    Dead items are never written.
    """

    total: jax.Array  # f32[items, kv_heads, head_dim, columns], weighted sum of values
    largest: jax.Array  # f32[items, kv_heads, columns], largest logit
    weight: jax.Array  # f32[items, kv_heads, columns], sum of weights


def decode_partials(
    q: jax.Array,  # [seqs, kv_heads, columns, head_dim]
    cells: jax.Array,  # [pages, 2, kv_heads, page_size, head_dim]
    block_tables: jax.Array,  # i32[seqs, pages_per_seq]
    context: jax.Array,  # i32[seqs], position of each sequence's first query
    plan: Plan,
    sizes: Sizes,
) -> Partials:
    """Attention of every work item to its keys.  Columns past the last query hold anything."""

    def paged_decode(*refs: Refs) -> None:
        _decode(sizes, _Memory(*refs))

    grid = (plan.seq.shape[0], q.shape[1])
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    column = f32((*grid, sizes.columns))
    kernel = plgpu.kernel(
        paged_decode,
        out_type=(f32((*grid, sizes.head_dim, sizes.columns)), column, column),
        grid=grid,
        grid_names=("item", "head"),
        scratch_types=_scratch(sizes),
        **interpreted(sizes.interpret),
    )
    out = kernel(plan.seq, plan.lo, plan.hi, context, block_tables, q, cells)
    return Partials(*out)


def interpreted(interpret: Any) -> dict[str, Any]:
    """Arguments that make a kernel run in the interpreter, or none."""
    return {} if interpret is None else {"interpret": interpret}


def store(ref: Any, x: Any) -> None:
    """Write registers to memory, in pieces of any size."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:  # JAX 0.11: a plain store demands no whole cache lines.
        ref[...] = x


def full(shape: tuple[int, ...], value: float, layout: Any) -> Any:
    """A constant in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def across_rows(x: Any, like: Any) -> Any:
    """One value per column, repeated over the rows of `like`."""
    return lax.broadcast_in_dim(x, like.shape, [1])


def _scratch(sizes: Sizes) -> tuple[Any, ...]:
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    block = (sizes.num_stages, sizes.block_kv, sizes.head_dim)
    tiles = plgpu.SMEM(block, sizes.dtype, transforms=tiled)
    weights = plgpu.SMEM((sizes.block_kv, sizes.columns), sizes.dtype)
    arrived = plgpu.Barrier(num_arrivals=sizes.copies, num_barriers=sizes.num_stages)
    return (tiles, tiles, weights, *((arrived, arrived) if sizes.tma else ()))


class _Memory(NamedTuple):
    """The kernel's references."""

    seq: Refs
    lo: Refs
    hi: Refs
    context: Refs
    tables: Refs
    q: Refs
    cells: Refs
    total: Refs
    largest: Refs
    weight: Refs
    keys: Refs
    values: Refs
    weights: Refs
    keys_arrived: Refs = None
    values_arrived: Refs = None


class _Item(NamedTuple):
    """The keys of the work item at hand."""

    seq: Any
    head: Any
    lo: Any
    hi: Any
    context: Any
    first: Any
    """`lo`, down to a multiple of `block_kv`: blocks are cut at fixed positions."""
    blocks: Any


def _decode(sizes: Sizes, memory: _Memory) -> None:
    number, head = lax.axis_index("item"), lax.axis_index("head")
    seq = memory.seq[number]

    @pl.when(seq >= 0)
    def live() -> None:
        lo, hi = memory.lo[number], memory.hi[number]
        first = lax.div(lo, sizes.block_kv) * sizes.block_kv
        blocks = lax.div(hi - first + (sizes.block_kv - 1), sizes.block_kv)
        item = _Item(seq, head, lo, hi, memory.context[seq], first, blocks)
        for j in range(sizes.num_stages):
            _fetch(sizes, memory, item, jnp.int32(j))
        queries = plgpu.load(
            memory.q.at[seq, head].transpose((1, 0)),
            layout=plgpu.Layout.MMA_RHS(sizes.dtype),
            optimized=False,
        )
        visit = functools.partial(_visit, sizes, memory, item, queries)
        state = lax.fori_loop(0, blocks, visit, start_state(sizes))
        if not sizes.tma:
            plgpu.wait_gmem_to_smem(0)
        for ref, x in zip((memory.total, memory.largest, memory.weight), state, strict=True):
            store(ref.at[number, head], x)


def start_state(sizes: Sizes) -> State:
    """The softmax over no keys."""
    column = sizes.accumulator.reduce(0)
    return State(
        full((sizes.head_dim, sizes.columns), 0, sizes.accumulator),
        full((sizes.columns,), MASK, column),
        full((sizes.columns,), 0, column),
    )


def _fetch(sizes: Sizes, memory: _Memory, item: _Item, j: Any) -> None:
    """Start the copies of block `j`, if there is one."""
    if sizes.tma:
        pl.when(j < item.blocks)(lambda: _copy_block(sizes, memory, item, j))
    else:
        # `cp.async` is waited for by a static count of copies, so every block has to be copied:
        # one past the end copies the null page.
        _copy_block(sizes, memory, item, j)


def _copy_block(sizes: Sizes, memory: _Memory, item: _Item, j: Any) -> None:
    rows, slot = sizes.copy_rows, lax.rem(j, sizes.num_stages)
    positions = [item.first + j * sizes.block_kv + i * rows for i in range(sizes.copies)]
    # All reads of the table come before the first copy, whose barrier would serialise them.
    pages = [_page(sizes, memory, item, position) for position in positions]
    targets = (memory.keys, memory.keys_arrived), (memory.values, memory.values_arrived)
    for kind, (tiles, arrived) in enumerate(targets):
        for i, (page, position) in enumerate(zip(pages, positions, strict=True)):
            cell = pl.multiple_of(lax.rem(position, sizes.page_size), rows)
            source = memory.cells.at[page, kind, item.head, pl.ds(cell, rows)]
            target = tiles.at[slot, pl.ds(i * rows, rows)]
            if sizes.tma:
                plgpu.copy_gmem_to_smem(source, target, arrived.at[slot])
            else:
                in_bounds = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
                plgpu.copy_gmem_to_smem(source, target, oob_mode=in_bounds)


def _page(sizes: Sizes, memory: _Memory, item: _Item, position: Any) -> Any:
    """Page of a copy; the null page if the item has no key there, where the table is garbage."""
    mine = (position < item.hi) & (position + sizes.copy_rows > item.lo)
    return jnp.where(mine, memory.tables[item.seq, _entry(sizes, memory, position)], NULL_PAGE)


def _entry(sizes: Sizes, memory: _Memory, position: Any) -> Any:
    last = memory.tables.shape[1] - 1
    return jnp.minimum(lax.div(position, sizes.page_size), last)


def _visit(sizes: Sizes, memory: _Memory, item: _Item, queries: Any, j: Any, state: State) -> State:
    """One block of keys and values joins the running softmax."""
    total, largest, weight = state
    operand = plgpu.Layout.MMA_LHS(sizes.dtype)
    slot, base = lax.rem(j, sizes.num_stages), item.first + j * sizes.block_kv
    product = _product(sizes)
    shape = (sizes.block_kv, sizes.columns)

    if sizes.tma:
        plgpu.barrier_wait(memory.keys_arrived.at[slot])
    else:
        plgpu.wait_gmem_to_smem((sizes.num_stages - 1) * 2 * sizes.copies)
    keys = plgpu.load(memory.keys.at[slot], layout=operand)
    logits = _scaled(sizes, product(full(shape, 0, sizes.accumulator), keys, queries))
    keep = _seen(sizes, item, base)
    logits = jnp.where(keep, logits, MASK)
    new = jnp.maximum(largest, logits.max(axis=0))
    shrink = jnp.exp2(largest - new)
    weights = jnp.where(keep, jnp.exp2(logits - across_rows(new, logits)), 0.0)
    weight = weight * shrink + weights.sum(axis=0)

    # The product spreads its rows over the warps; as an operand all of them hold the columns.
    store(memory.weights, weights.astype(sizes.dtype))
    weights = plgpu.load(memory.weights, layout=plgpu.Layout.MMA_RHS(sizes.dtype), optimized=False)
    if sizes.tma:
        plgpu.barrier_wait(memory.values_arrived.at[slot])
    values = plgpu.load(memory.values.at[slot].transpose((1, 0)), layout=operand)
    values = _zeroed(values, _owned(item, base, values.shape, 1, operand))
    total = product(total * across_rows(shrink, total), values, weights)
    if sizes.tma:
        plgpu.commit_smem()  # Orders the reads of this slot before the copies that refill it.
    _fetch(sizes, memory, item, j + sizes.num_stages)
    return State(total, new, weight)


def _product(sizes: Sizes) -> Callable[[Any, Any, Any], Any]:
    if sizes.interpret is None:
        return plgpu.mma
    # The interpreter does not know the instruction.
    return lambda acc, a, b: acc + jnp.dot(a, b, preferred_element_type=jnp.float32)


def _scaled(sizes: Sizes, logits: Any) -> Any:
    """Logits in base 2."""
    if sizes.soft_cap is None:
        return logits * (sizes.sm_scale * LOG2E)
    capped = jnp.tanh(logits * (sizes.sm_scale / sizes.soft_cap))
    return capped * (sizes.soft_cap * LOG2E)


def _owned(item: _Item, base: Any, shape: tuple[int, ...], axis: int, layout: Any) -> Any:
    """Which keys, counted along `axis` from `base` on, are the item's."""
    position = base + plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)
    return (position >= item.lo) & (position < item.hi)


def _seen(sizes: Sizes, item: _Item, base: Any) -> Any:
    """Which keys each column attends to; one query per item sees all of the item's."""
    shape, layout = (sizes.block_kv, sizes.columns), sizes.accumulator
    keep = _owned(item, base, shape, 0, layout)
    if sizes.block_q == 1:
        return keep
    position = base + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    own = item.context + lax.div(column, jnp.full_like(column, sizes.group))
    keep &= position <= own
    if sizes.window is not None:
        keep &= position > own - sizes.window
    return keep


def _zeroed(values: Any, keep: Any) -> Any:
    """Values outside the item become 0: their weight is, but 0 * NaN is NaN."""
    return jnp.where(keep, values, jnp.zeros_like(values))

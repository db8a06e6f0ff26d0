"""Attention on TPUs by JAX's in-tree ragged paged attention kernel.

Knows that kernel's contract and how to meet it: heads padded, holes moved out of its way.  Does
not know how the pages lie; `TPULayout` does.

The kernel fetches the first block of keys of the next sequence while it computes the present
one, so that a sequence without keys, or the last one without queries, would leave a copy that
nobody waits for.  And it computes all query rows of a block for each of the block's sequences.
So the sequences that have work are brought to the front, their query rows too, and a call
without any gets one harmless sequence: one query of one key of the null page.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import NULL_PAGE, KVPages
from pallas_kernels.plan import Plan
from pallas_kernels.registry import AttentionOptions, Use
from pallas_kernels.rows import row_positions
from pallas_kernels.tpu_layout import LANES, TPULayout, padded_kv_heads

QUERY_BLOCK = 32
"""Query rows of a program: the commonest entry of the in-tree table of measured sizes, which
cannot be asked here, since it looks at the devices of the process and not of the mesh."""
MAX_TABLE_BYTES = 960 << 10
"""Bytes of a call's block tables, which lie in the scalar memory of 1 MiB beside smaller things."""


def refusal(use: Use) -> str | None:
    """The limit of the in-tree kernel that a use exceeds, or None."""
    layout = use.layout
    if layout.quantized is not None:
        return f"has one scale for a whole cache, not one per token: no {layout.quantized} pages"
    if layout.dtype != jnp.bfloat16:
        # It takes float32 too, but its products have the default precision: bfloat16.
        return f"takes bfloat16 pages, not {layout.dtype}"
    if use.sinks:
        return "has no attention sinks"
    if layout.head_dim > LANES:
        # It reads keys with a stride, which the compiler has for rows of one register only.
        return f"takes head sizes up to {LANES}, not {layout.head_dim}"
    return None


def attention(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    plan: Plan,
    sinks: jax.Array | None,
    options: AttentionOptions,
) -> jax.Array:
    """`ragged_paged_attention` by the in-tree kernel, which makes its own plan.

    Both forms are one: its blocks of query rows span sequences.

    Raises:
        ValueError: the pages have another layout, a device's share of the heads does not fill
            tiles, or the block tables do not fit the scalar memory.
    """
    assert sinks is None, "refused at start-up"
    layout = options.layout
    if not isinstance(layout, TPULayout):
        raise ValueError("the tpu attention reads pages of the layout that `select` gives with it")
    rows, q_heads, head_dim = q.shape
    kv_heads = layout.local_kv_heads(pages)
    _check_tables(block_tables.shape)
    _check_heads(pages.cells.shape[2] // 2, layout)
    combined, padded_dim = pages.cells.shape[2:]
    work = _front(rows, block_tables, kv_lens, cu_q_lens)
    grouped = q[work.source].reshape(rows, kv_heads, q_heads // kv_heads, head_dim)
    missing = (combined // 2 - kv_heads, padded_dim - head_dim)
    padded = jnp.pad(grouped, ((0, 0), (0, missing[0]), (0, 0), (0, missing[1])))
    out = in_tree(
        padded.reshape(rows, -1, padded_dim),
        layout.as_cells(pages.cells),
        work.kv_lens,
        work.block_tables,
        work.cu_q_lens,
        work.num_seqs,
        sm_scale=options.sm_scale,
        sliding_window=options.window,
        soft_cap=options.soft_cap,
        num_kv_pages_per_block=_pages_per_block(options, block_tables.shape[1]),
        num_queries_per_block=min(rows, QUERY_BLOCK),
    )
    # Rows of the kernel's output that it has not computed may hold anything.
    mine = out[work.place, :q_heads, :head_dim]
    return jnp.where(work.computed[:, None, None], mine, 0).astype(q.dtype)


def in_tree(*arguments: jax.Array, **options: object) -> jax.Array:
    """The kernel: `jax.experimental.pallas.ops.tpu.ragged_paged_attention`.

    Imported on use: other platforms need not have what it imports.
    """
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as package

    return package.ragged_paged_attention(*arguments, **options)


class _Work(NamedTuple):
    """A call without holes, and where its rows come from and go."""

    block_tables: jax.Array  # i32[seqs, pages_per_seq]
    kv_lens: jax.Array  # i32[seqs]
    cu_q_lens: jax.Array  # i32[seqs + 1]
    num_seqs: jax.Array  # i32[1], sequences that have work, at least 1
    source: jax.Array  # i32[rows], the caller's row of each of the kernel's
    place: jax.Array  # i32[rows], the kernel's row of each of the caller's
    computed: jax.Array  # bool[rows], whether the caller's row has one


def _front(
    num_rows: int, block_tables: jax.Array, kv_lens: jax.Array, cu_q_lens: jax.Array
) -> _Work:
    """Bring sequences with keys and queries to the front, in order, and their rows too."""
    _, seen = row_positions(num_rows, kv_lens, cu_q_lens)
    computed = seen > 0
    source = jnp.argsort(~computed, stable=True)
    # As many rows as `seen` counts: none before a sequence's first position.
    q_lens = jnp.minimum(cu_q_lens[1:] - cu_q_lens[:-1], kv_lens)
    order = jnp.argsort(q_lens <= 0, stable=True)
    working = q_lens[order] > 0
    ends = jnp.cumsum(jnp.where(working, q_lens[order], 0), dtype=jnp.int32)
    return _Work(
        block_tables=jnp.where(working[:, None], block_tables[order], NULL_PAGE),
        kv_lens=jnp.where(working, kv_lens[order], 1),
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.maximum(ends, 1)]),
        num_seqs=jnp.maximum(working.sum(dtype=jnp.int32), 1)[None],
        source=source,
        place=jnp.where(computed, jnp.cumsum(computed, dtype=jnp.int32) - 1, 0),
        computed=computed,
    )


def _pages_per_block(options: AttentionOptions, pages_per_seq: int) -> int:
    return min(max(1, options.block_kv // options.layout.page_size), pages_per_seq)


def _check_tables(shape: tuple[int, ...]) -> None:
    seqs, pages_per_seq = shape
    needed = 4 * (-(-seqs // 8) * 8) * (-(-pages_per_seq // LANES) * LANES)
    if needed > MAX_TABLE_BYTES:
        raise ValueError(
            f"block tables of {seqs} sequences of {pages_per_seq} pages take {needed} bytes of "
            f"scalar memory, the tpu attention has {MAX_TABLE_BYTES}; use larger pages, fewer "
            f"sequences or shorter ones"
        )


def _check_heads(share: int, layout: TPULayout) -> None:
    if padded_kv_heads(share, layout.dtype) != share:
        raise ValueError(
            f"the tpu attention cannot split {layout.num_kv_heads} KV heads into shares of "
            f"{share}, which do not fill tiles; use more or fewer devices"
        )

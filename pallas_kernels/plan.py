"""The work list of one attention call: which query rows meet which keys.

The plan is computed once per step, inside the compiled step, and shared by every layer with the
same window.  Its arrays have a fixed size, so that nothing about a step's contents can change a
shape; items past `need` are dead.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Plan(NamedTuple):
    """Work items, each one block of query rows of one sequence against a run of its keys.

    Items of a sequence are consecutive, query blocks in order and, within one, key chunks in
    order.
    """

    seq: jax.Array  # i32[items], -1 for a dead item
    q0: jax.Array  # i32[items], first query token of the block, counted within the sequence
    lo: jax.Array  # i32[items], first key position
    hi: jax.Array  # i32[items], one past the last key position
    start: jax.Array  # i32[seqs], first item of each sequence
    count: jax.Array  # type: ignore[assignment]  # i32[seqs], items of each sequence
    need: jax.Array  # i32[], live items


def items_bound(num_rows: int, num_seqs: int, block_q: int) -> int:
    """Most items that `num_rows` query rows of `num_seqs` sequences can need, unsplit."""
    return num_rows // block_q + min(num_seqs, num_rows)


def split_items_bound(
    num_seqs: int, max_len: int, chunk_kv: int, window: int | None, block_q: int = 1
) -> int:
    """Most items that one block of `block_q` query rows of each sequence can need, split.

    Prefix pages are shared, so that the keys of all sequences together may be more than the
    cache has cells: only the longest sequence bounds them.
    """
    chunks = -(-max_len // chunk_kv)
    if window is not None:  # the rows together see window + block_q - 1 keys, from anywhere on
        chunks = min(chunks, 1 + -(-(window + block_q - 2) // chunk_kv))
    return num_seqs * chunks


def _chunks(
    kv_lens: jax.Array, q_lens: jax.Array, chunk_kv: int | None, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """The first chunk of each sequence that its queries see, and how many there are."""
    if chunk_kv is None:
        return jnp.zeros_like(kv_lens), jnp.ones_like(kv_lens)
    oldest = jnp.zeros_like(kv_lens)
    if window is not None:
        oldest = jnp.maximum(kv_lens - q_lens - window + 1, 0)
    first = oldest // chunk_kv
    return first, jnp.maximum(-(-kv_lens // chunk_kv) - first, 1)


def make_plan(
    kv_lens: jax.Array,  # i32[seqs]
    q_lens: jax.Array,  # i32[seqs]
    *,
    num_items: int,
    block_q: int,
    chunk_kv: int | None = None,
    window: int | None = None,
) -> Plan:
    """List the work of one attention call over sequences of any lengths.

    The query tokens of a sequence are its last `q_lens` positions; each sees the keys at and
    before its own position, the last `window` of them if there is a window.

    Args:
        kv_lens: keys of each sequence, the queries' own included; 0 for an inactive one.
        q_lens: query tokens of each sequence; 0 for an inactive one.
        num_items: size of the plan.  The caller guarantees that it suffices: items past it
            would be lost.
        block_q: most query tokens of an item.
        chunk_kv: most keys of an item, cut at multiples of it whatever the other sequences
            are, so that a sequence's arithmetic does not depend on its neighbours (split-KV, as
            in FlashDecoding); `None` leaves an item all its keys.
        window: keys a query sees, its own included; `None` for all.

    Returns:
        The plan, dead items zeroed.
    """
    kv_lens = kv_lens.astype(jnp.int32)
    q_lens = q_lens.astype(jnp.int32)
    live = (q_lens > 0) & (kv_lens > 0)
    q_blocks = -(-q_lens // block_q)
    first_chunk, chunks = _chunks(kv_lens, q_lens, chunk_kv, window)
    count = jnp.where(live, q_blocks * chunks, 0)
    ends = jnp.cumsum(count)
    start = ends - count

    item = jnp.arange(num_items, dtype=jnp.int32)
    alive = item < ends[-1]
    seq = jnp.where(
        alive, jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32), 0
    )
    rank = item - start[seq]
    q0 = rank // chunks[seq] * block_q
    context = kv_lens[seq] - q_lens[seq]
    hi = context + jnp.minimum(q0 + block_q, q_lens[seq])
    lo = jnp.zeros_like(hi)
    if window is not None:
        lo = jnp.maximum(context + q0 - window + 1, 0)
    if chunk_kv is not None:
        chunk = first_chunk[seq] + rank % chunks[seq]
        lo = jnp.maximum(lo, chunk * chunk_kv)
        hi = jnp.minimum(hi, (chunk + 1) * chunk_kv)

    def keep(values: jax.Array) -> jax.Array:
        return jnp.where(alive, values, 0)

    return Plan(
        seq=jnp.where(alive, seq, -1),
        q0=keep(q0),
        lo=keep(lo),
        hi=keep(hi),
        start=start,
        count=count,
        need=ends[-1],
    )

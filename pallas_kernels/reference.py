"""NumPy oracles of the operations: loops over tokens, no cleverness, float64 inside."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]


def attention(
    q: Array,  # [rows, q_heads, head_dim]
    k_pages: Array,  # [pages, kv_heads, page_size, head_dim]
    v_pages: Array,  # [pages, kv_heads, page_size, head_dim]
    block_tables: Ints,  # [seqs, pages_per_seq]
    kv_lens: Ints,  # [seqs]
    cu_q_lens: Ints,  # [seqs + 1]
    *,
    sm_scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,  # [q_heads]
) -> Array:
    """`ragged_paged_attention`, literally; rows of no active sequence are zero."""
    out = np.zeros(q.shape, np.float64)
    page_size = k_pages.shape[2]
    group = q.shape[1] // k_pages.shape[1]
    for s, length in enumerate(kv_lens):
        for row in range(cu_q_lens[s], cu_q_lens[s + 1]):
            position = length - cu_q_lens[s + 1] + row
            if length == 0 or position < 0:
                continue
            oldest = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(oldest, position + 1)
            pages, cells = block_tables[s][seen // page_size], seen % page_size
            for head in range(q.shape[1]):
                k = k_pages[pages, head // group, cells].astype(np.float64)
                v = v_pages[pages, head // group, cells].astype(np.float64)
                logits = sm_scale * (k @ q[row, head].astype(np.float64))
                if soft_cap is not None:
                    logits = soft_cap * np.tanh(logits / soft_cap)
                sink = -np.inf if sinks is None else float(sinks[head])
                largest = max(logits.max(), sink)
                weights = np.exp(logits - largest)
                out[row, head] = weights @ v / (weights.sum() + np.exp(sink - largest))
    return out


def plan(
    kv_lens: Ints,
    q_lens: Ints,
    *,
    block_q: int,
    chunk_kv: int | None = None,
    window: int | None = None,
) -> list[tuple[int, int, int, int]]:
    """`make_plan`'s live items as tuples (sequence, q0, lo, hi), in order."""
    items = []
    for s, (length, queries) in enumerate(zip(kv_lens.tolist(), q_lens.tolist(), strict=True)):
        if length == 0 or queries == 0:
            continue
        context = length - queries
        oldest = 0 if window is None else max(0, context - window + 1)
        for q0 in range(0, queries, block_q):
            hi = context + min(q0 + block_q, queries)
            lo = 0 if window is None else max(0, context + q0 - window + 1)
            if chunk_kv is None:
                items.append((s, q0, lo, hi))
                continue
            for chunk in range(oldest // chunk_kv, -(-length // chunk_kv)):
                low, high = chunk * chunk_kv, (chunk + 1) * chunk_kv
                items.append((s, q0, max(lo, low), min(hi, high)))
    return items

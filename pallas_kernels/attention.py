"""The public operations: attention over pages and the write of new keys and values.

They check shapes and hand over to an implementation of the registry; the mathematics is in the
docstrings here and, executable, in `pallas_kernels.reference`.
"""

from __future__ import annotations

import jax

from pallas_kernels.layout import KVLayout
from pallas_kernels.plan import Plan
from pallas_kernels.registry import AttentionOptions, choose


def ragged_paged_attention(
    q: jax.Array,  # [rows, q_heads, head_dim]
    cache: jax.Array,  # one layer, as `layout` lays it out
    block_tables: jax.Array,  # i32[seqs, pages_per_seq]
    kv_lens: jax.Array,  # i32[seqs]
    cu_q_lens: jax.Array,  # i32[seqs + 1]
    plan: Plan | None,
    *,
    layout: KVLayout,
    sm_scale: float,
    split: bool,
    block_q: int,
    block_kv: int,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:  # [rows, q_heads, head_dim]
    """Attention of each sequence's last tokens to all its keys in the paged cache.

    Row `r` of sequence `s` (`cu_q_lens[s] <= r < cu_q_lens[s + 1]`) stands at position
    `p = kv_lens[s] - cu_q_lens[s + 1] + r` and gets, for its head `h` of group `g = h // G`,

        out[r, h] = sum_t softmax_t(cap(sm_scale * q[r, h] . k[t, g])) v[t, g]

    over positions `max(0, p - window + 1) <= t <= p`, where `cap(x) = soft_cap * tanh(x /
    soft_cap)` if there is a cap (GQA, arXiv:2305.13245).  Position `t` lies in cell
    `t % page_size` of page `block_tables[s, t // page_size]` (PagedAttention,
    arXiv:2309.06180).  Keys of a sequence are visited in blocks cut at fixed positions with a
    running softmax (FlashAttention, arXiv:2205.14135), so a row's arithmetic does not depend on
    its neighbours.  Cells past a sequence's length are never part of a result, whatever they
    hold, NaN included.

    Args:
        q: queries.  Their keys and values are in the cache already.
        cache: pages of one layer.
        block_tables: page numbers; entries past a sequence's length are ignored.
        kv_lens: keys of each sequence, those of the queries included; 0 if inactive.
        cu_q_lens: exclusive cumulative number of query rows of each sequence.
        plan: `make_plan`'s work list for the same lengths, `block_q` and window.  Needed by the
            chunk form (`split=False`).
        layout: layout of `cache`.
        sm_scale: factor on the logits, usually `head_dim ** -0.5`.
        split: True for decode, at most `block_q` rows per sequence; False for prefill chunks.
        block_q: query tokens of a work item.
        block_kv: keys visited at once by the chunk form; a multiple of the page size.
        window: keys a query sees, its own included; `None` for all.
        soft_cap: bound of the logits; `None` for none.
        implementation: a name in `implementations()` or "auto".

    Returns:
        Attention in the type of `q`; rows of no active sequence are exactly zero.

    Raises:
        ValueError: shapes that do not fit together.

    Products accumulate in float32 and the softmax is in float32 whatever the inputs are.
    """
    _, q_heads, head_dim = q.shape
    kv_heads = layout.local_kv_heads(cache)
    if head_dim != layout.head_dim:
        raise ValueError(f"q has head_dim {head_dim}, the cache has {layout.head_dim}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} KV heads")
    if kv_lens.shape[0] + 1 != cu_q_lens.shape[0] or kv_lens.shape[0] != block_tables.shape[0]:
        raise ValueError(
            f"lengths of {kv_lens.shape[0]} sequences, cumulative query lengths of "
            f"{cu_q_lens.shape[0] - 1} and block tables of {block_tables.shape[0]} differ"
        )
    if block_kv % layout.page_size:
        raise ValueError(f"block_kv={block_kv} is not a multiple of page_size={layout.page_size}")
    if plan is None and not split:
        raise ValueError("the chunk form (split=False) needs a plan; see make_plan")
    options = AttentionOptions(
        layout=layout,
        sm_scale=sm_scale,
        split=split,
        block_q=block_q,
        block_kv=block_kv,
        window=window,
        soft_cap=soft_cap,
    )
    attend = choose(implementation, layout.platform).attention
    return attend(q, cache, block_tables, kv_lens, cu_q_lens, plan, options)


def kv_write(
    k: jax.Array,  # [rows, kv_heads, head_dim]
    v: jax.Array,  # [rows, kv_heads, head_dim]
    slots: jax.Array,  # i32[rows]
    cache: jax.Array,
    *,
    layout: KVLayout,
    cos: jax.Array | None = None,  # f32[rows, head_dim / 2]
    sin: jax.Array | None = None,  # f32[rows, head_dim / 2]
    implementation: str = "auto",
) -> jax.Array:
    """Write each row's key and value into its cell and return the updated cache.

    Donate the cache to the surrounding `jit`: the write is then in place.

    Args:
        k: keys; rotated here by `cos` and `sin` (rotate-half RoPE, arXiv:2104.09864, in
            float32) if those are given, else written as they are.
        v: values.
        slots: `page * page_size + offset` of each row, negative to write nothing.
        cache: pages of one layer.
        layout: layout of `cache`.
        cos: cosines of the rows' rotary angles.
        sin: sines of the same angles.
        implementation: a name in `implementations()` or "auto".

    Raises:
        ValueError: shapes that do not fit together.
    """
    if k.shape != v.shape or k.shape[0] != slots.shape[0]:
        raise ValueError(f"k {k.shape}, v {v.shape} and slots {slots.shape} do not fit together")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be given together")
    return choose(implementation, layout.platform).write(k, v, slots, cache, layout, cos, sin)

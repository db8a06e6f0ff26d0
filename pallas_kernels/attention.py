"""The public operations: attention over pages and the write of new keys and values.

They check shapes and hand over to an implementation of the registry; the mathematics is in the
docstrings here and, executable, in `pallas_kernels.reference`.
"""

from __future__ import annotations

import jax

from pallas_kernels.layout import KVLayout, KVPages
from pallas_kernels.plan import Plan
from pallas_kernels.registry import AttentionOptions, Use, choose
from pallas_kernels.tuning import DEFAULT_LAUNCH, Launch


def ragged_paged_attention(
    q: jax.Array,  # [rows, q_heads, head_dim]
    pages: KVPages,  # one layer, as `layout` lays it out
    block_tables: jax.Array,  # i32[seqs, pages_per_seq]
    kv_lens: jax.Array,  # i32[seqs]
    cu_q_lens: jax.Array,  # i32[seqs + 1]
    plan: Plan,
    *,
    layout: KVLayout,
    sm_scale: float,
    split: bool,
    block_q: int,
    block_kv: int,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # f32[q_heads]
    launch: Launch = DEFAULT_LAUNCH,
    implementation: str = "auto",
) -> jax.Array:  # [rows, q_heads, head_dim]
    """Attention of each sequence's last tokens to all its keys in the paged cache.

    Row `r` of sequence `s` (`cu_q_lens[s] <= r < cu_q_lens[s + 1]`) stands at position
    `p = kv_lens[s] - cu_q_lens[s + 1] + r` and gets, for its head `h` of group `g = h // G`,

        out[r, h] = sum_t softmax_t(cap(sm_scale * q[r, h] . k[t, g])) v[t, g]

    over positions `max(0, p - window + 1) <= t <= p`, where `cap(x) = soft_cap * tanh(x /
    soft_cap)` if there is a cap (GQA, arXiv:2305.13245).  A sink is one more logit of its head
    that takes a share of the softmax and has no value (arXiv:2309.17453).  Position `t` lies in
    cell `t % page_size` of page `block_tables[s, t // page_size]` (PagedAttention,
    arXiv:2309.06180).  Keys of a sequence are visited in blocks cut at fixed positions with a
    running softmax (FlashAttention, arXiv:2205.14135), so a row's arithmetic does not depend on
    its neighbours.  Cells past a sequence's length are never part of a result, whatever they
    hold, NaN included.

    Args:
        q: queries.  Their keys and values are in the cache already.
        pages: the cache of one layer.
        block_tables: page numbers; entries past a sequence's length are ignored.
        kv_lens: keys of each sequence, those of the queries included; 0 if inactive.
        cu_q_lens: exclusive cumulative number of query rows of each sequence.
        plan: `make_plan`'s work list for the same lengths, `block_q` and window, with `chunk_kv`
            if `split`, without if not.
        layout: layout of `pages`.
        sm_scale: factor on the logits, usually `head_dim ** -0.5`.
        split: True for decode, at most `block_q` rows per sequence, whose keys several work
            items share; False for prefill chunks.
        block_q: query tokens of a work item.
        block_kv: keys visited at once; a multiple of the page size or a divisor of it.
        window: keys a query sees, its own included; `None` for all.
        soft_cap: bound of the logits; `None` for none.
        sinks: logit of each head's sink; `None` for none.
        launch: launch sizes of GPU kernels.
        implementation: a name in `implementations()` or "auto".

    Returns:
        Attention in the type of `q`; rows of no active sequence are exactly zero.

    Raises:
        ValueError: shapes that do not fit together, or that the implementation does not serve.

    Products accumulate in float32 and the softmax is in float32 whatever the inputs are.
    """
    group = q.shape[1] // layout.local_kv_heads(pages)
    _check(q, pages, block_tables, kv_lens, cu_q_lens, sinks, layout, block_kv)
    options = AttentionOptions(
        layout=layout,
        sm_scale=sm_scale,
        split=split,
        block_q=block_q,
        block_kv=block_kv,
        window=window,
        soft_cap=soft_cap,
        launch=launch,
    )
    attend = choose(implementation, Use(layout, group, sinks is not None)).attention
    return attend(q, pages, block_tables, kv_lens, cu_q_lens, plan, sinks, options)


def _check(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    sinks: jax.Array | None,
    layout: KVLayout,
    block_kv: int,
) -> None:
    """Raise ValueError if the shapes of an attention call do not fit together."""
    _, q_heads, head_dim = q.shape
    kv_heads = layout.local_kv_heads(pages)
    if head_dim != layout.head_dim:
        raise ValueError(f"q has head_dim {head_dim}, the cache has {layout.head_dim}")
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} KV heads")
    if kv_lens.shape[0] + 1 != cu_q_lens.shape[0] or kv_lens.shape[0] != block_tables.shape[0]:
        raise ValueError(
            f"lengths of {kv_lens.shape[0]} sequences, cumulative query lengths of "
            f"{cu_q_lens.shape[0] - 1} and block tables of {block_tables.shape[0]} differ"
        )
    if sinks is not None and sinks.shape != (q_heads,):
        raise ValueError(f"sinks {sinks.shape} are not one for each of {q_heads} query heads")
    if block_kv % layout.page_size and layout.page_size % block_kv:
        raise ValueError(
            f"block_kv={block_kv} is neither a multiple nor a divisor of "
            f"page_size={layout.page_size}"
        )


def kv_write(
    k: jax.Array,  # [rows, kv_heads, head_dim]
    v: jax.Array,  # [rows, kv_heads, head_dim]
    slots: jax.Array,  # i32[rows]
    pages: KVPages,
    *,
    layout: KVLayout,
    cos: jax.Array | None = None,  # f32[rows, head_dim / 2]
    sin: jax.Array | None = None,  # f32[rows, head_dim / 2]
    implementation: str = "auto",
) -> KVPages:
    """Write each row's key and value into its cell and return the updated pages.

    Donate the pages to the surrounding `jit`: the write is then in place.

    Args:
        k: keys; rotated here by `cos` and `sin` (rotate-half RoPE, arXiv:2104.09864, in
            float32) if those are given, else written as they are.
        v: values.
        slots: `page * page_size + offset` of each row, negative to write nothing.
        pages: the cache of one layer.
        layout: layout of `pages`.
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
    write = choose(implementation, Use(layout)).write
    return write(k, v, slots, pages, layout, cos, sin)


def copy_pages(
    pages: KVPages,
    source: jax.Array,  # i32[n]
    target: jax.Array,  # i32[n]
    *,
    layout: KVLayout,
) -> KVPages:
    """Copy whole pages of one layer within its cache and return the updated pages.

    A pair with a negative target copies nothing.  No target may be another pair's source.
    """
    return layout.copy_pages(pages, source, target)

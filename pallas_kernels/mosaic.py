"""Decode attention on Pallas Mosaic GPU, the successor of Pallas Triton; needs JAX 0.11.

What its kernels take, and how query rows become their columns.  Opt-in: the kernels are checked
by the interpreter and by compilers, and have not run on a GPU.  Prefill and the KV write are
those of the Triton implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import triton
from pallas_kernels.layout import KVLayout, KVPages
from pallas_kernels.plan import Plan
from pallas_kernels.registry import AttentionOptions, Use
from pallas_kernels.rows import row_positions

if TYPE_CHECKING:
    from pallas_kernels.mosaic_decode import Sizes

MIN_JAX = (0, 11)
DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
PAGE_SIZES = (16, 32, 64, 128)
MAX_COLUMNS = {64: 32, 128: 32, 256: 16}
"""Query heads of an item, over all its tokens, that the registers hold, by head_dim."""
MATRIX_ROWS = 64
"""Keys that the four warps of a kernel multiply at once."""
AMPERE, HOPPER = (8, 0), (9, 0)
ASYNC_COPY_ELEMENTS = 2048
"""What the threads of a kernel copy at once by `cp.async`."""


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
    """`ragged_paged_attention`, decode here and prefill by the Triton kernel."""
    attend = decode if options.split else triton.attention
    return attend(q, pages, block_tables, kv_lens, cu_q_lens, plan, sinks, options)


def write(
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    pages: KVPages,
    layout: KVLayout,
    cos: jax.Array | None,
    sin: jax.Array | None,
) -> KVPages:
    """`kv_write` by the Triton kernel."""
    return triton.write(k, v, slots, pages, layout, cos, sin)


def refusal(use: Use) -> str | None:
    """The limit that `use` exceeds, or None."""
    layout, capability = use.layout, use.compute_capability
    if jax.__version_info__ < MIN_JAX:
        return f"needs JAX 0.11 or later, not {jax.__version__}"
    if capability is not None and capability < AMPERE:
        return f"needs compute capability 8.0 or higher, not {triton.dotted(capability)}"
    if layout.quantized is not None:
        return f"takes 16-bit pages, not {layout.quantized}"
    if layout.dtype not in DTYPES:
        return f"takes bfloat16 and float16, not {layout.dtype}"
    if layout.head_dim not in MAX_COLUMNS:
        return f"takes head_dim {_listed(MAX_COLUMNS)}, not {layout.head_dim}"
    if layout.page_size not in PAGE_SIZES:
        return f"takes page sizes {_listed(PAGE_SIZES)}, not {layout.page_size}"
    most = MAX_COLUMNS[layout.head_dim]
    if use.group > most:
        return f"takes up to {most} query heads per KV head, not {use.group}"
    if capability is not None and capability < HOPPER:
        smallest = ASYNC_COPY_ELEMENTS // layout.head_dim
        if layout.page_size < smallest:
            return (
                f"takes page sizes from {smallest} with head_dim {layout.head_dim} on compute "
                f"capability {triton.dotted(capability)}, not {layout.page_size}"
            )
    return triton.refusal(use)


# One trace for all layers of a model, which differ in nothing static.
@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def decode(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    plan: Plan,
    sinks: jax.Array | None,
    options: AttentionOptions,
    interpret: Any = None,
) -> jax.Array:
    """`ragged_paged_attention` for the rows of decode steps.

    Args:
        q: queries, `[rows, q_heads, head_dim]`.
        pages: 16-bit cells.
        block_tables: pages of each sequence.
        kv_lens: keys of each sequence.
        cu_q_lens: first query row of each sequence, at most `block_q` rows each.
        plan: a plan with `chunk_kv`.
        sinks: logit of each head's sink.
        options: `block_kv` is rounded up to a multiple of 64 keys, and the launch to two stages;
            a launch has four warps.
        interpret: parameters of Mosaic GPU's interpreter, to run on a CPU.

    Raises:
        ValueError: an item has more query heads than fit.
    """
    from pallas_kernels.mosaic_combine import combine
    from pallas_kernels.mosaic_decode import decode_partials

    layout = options.layout
    heads = layout.local_kv_heads(pages)
    sizes = _sizes(options, q.shape[1] // heads, interpret)
    columns = _columns(q.astype(layout.dtype), cu_q_lens, heads, sizes)
    context = kv_lens - (cu_q_lens[1:] - cu_q_lens[:-1])
    cells = layout.as_cells(pages.cells)
    partials = decode_partials(columns, cells, block_tables, context, plan, sizes)
    out = combine(partials, plan, _sinks_of_columns(sinks, heads, sizes), sizes)
    return _rows(out, q.shape, kv_lens, cu_q_lens, sizes).astype(q.dtype)


def _sizes(options: AttentionOptions, group: int, interpret: Any) -> Sizes:
    from pallas_kernels.mosaic_decode import Sizes

    layout = options.layout
    most = MAX_COLUMNS[layout.head_dim]
    if group * options.block_q > most:
        raise ValueError(
            f"attention implementation 'pallas_mgpu' takes up to {most} query heads per KV head "
            f"over all rows of a sequence, not {group} in each of {options.block_q} rows"
        )
    return Sizes(
        dtype=layout.dtype,
        head_dim=layout.head_dim,
        page_size=layout.page_size,
        group=group,
        block_q=options.block_q,
        block_kv=-(-options.block_kv // MATRIX_ROWS) * MATRIX_ROWS,
        num_stages=max(options.launch.num_stages, 2),
        sm_scale=options.sm_scale,
        window=options.window,
        soft_cap=options.soft_cap,
        tma=interpret is not None or _has_tma(),
        interpret=interpret,
    )


def _sinks_of_columns(
    sinks: jax.Array | None, heads: int, sizes: Sizes
) -> jax.Array | None:  # f32[kv_heads, columns]
    if sinks is None:
        return None
    each = jnp.tile(sinks.reshape(heads, sizes.group), sizes.block_q)
    return jnp.pad(each, ((0, 0), (0, sizes.columns - each.shape[1])))


def _columns(
    q: jax.Array, cu_q_lens: jax.Array, heads: int, sizes: Sizes
) -> jax.Array:  # [seqs, kv_heads, columns, head_dim]
    """Queries of each sequence, token by token, in the heads of each KV head."""
    tokens = cu_q_lens[:-1, None] + jnp.arange(sizes.block_q, dtype=jnp.int32)
    taken = q.at[tokens].get(mode="clip")
    shape = (*tokens.shape, heads, sizes.group, sizes.head_dim)
    columns = taken.reshape(shape).swapaxes(1, 2).reshape(shape[0], heads, -1, sizes.head_dim)
    return jnp.pad(columns, ((0, 0), (0, 0), (0, sizes.columns - columns.shape[2]), (0, 0)))


def _rows(
    out: jax.Array,  # [seqs, kv_heads, head_dim, columns]
    shape: tuple[int, ...],
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    sizes: Sizes,
) -> jax.Array:  # [rows, q_heads, head_dim]
    """The inverse of `_columns`; rows of no active sequence are zero."""
    seq, seen = row_positions(shape[0], kv_lens, cu_q_lens)
    token = jnp.arange(shape[0], dtype=jnp.int32) - cu_q_lens[seq]
    used = out[..., : sizes.block_q * sizes.group]
    seqs, heads, head_dim, _ = used.shape
    tokens = used.reshape(seqs, heads, head_dim, sizes.block_q, sizes.group)
    tokens = tokens.transpose(0, 3, 1, 4, 2)  # [seqs, tokens, kv_heads, group, head_dim]
    rows = tokens.at[seq, token].get(mode="clip").reshape(shape)
    return jnp.where((seen > 0)[:, None, None], rows, 0)


def _has_tma() -> bool:
    """Whether the chip compiled for copies by TMA; an unknown one does, as Mosaic GPU assumes."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    for device in (described, jax.local_devices()[0]):
        capability = getattr(device, "compute_capability", None)
        if capability is not None:
            return int(capability.split(".")[0]) >= HOPPER[0]
    return True


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))

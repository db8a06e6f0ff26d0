"""Pallas Triton implementation, for NVIDIA GPUs; interpreted, the same kernels run on a CPU.

Splits a call into launches: decode is `ragged` over work items and then `combine` over rows,
chunks are `ragged` alone.  The kernels read and write the cache as it is, whatever its head_dim:
nothing is padded, gathered or copied around them.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import combine, ragged
from pallas_kernels import write as writing
from pallas_kernels._triton import SMALLEST_PRODUCT, call
from pallas_kernels.layout import KVLayout, KVPages
from pallas_kernels.plan import Plan
from pallas_kernels.quantize import FP8
from pallas_kernels.registry import AttentionOptions, Use
from pallas_kernels.rows import row_positions

_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32))


def refusal(use: Use) -> str | None:
    """The limit of the kernels that `use` exceeds, or None."""
    layout, capability = use.layout, use.compute_capability
    size = layout.page_size
    if not 32 <= layout.head_dim <= 256:
        return f"takes head_dim from 32 to 256, not {layout.head_dim}"
    if layout.head_dim % 2:
        return f"takes an even head_dim, not {layout.head_dim}"
    if not 16 <= size <= 128:
        return f"takes page sizes from 16 to 128, not {size}"
    if size & (size - 1):
        return f"takes page sizes that are powers of two, not {size}"
    if layout.dtype not in _DTYPES:
        return f"takes float16, bfloat16 and float32, not {layout.dtype}"
    if capability is not None and capability < (8, 0):
        return f"needs compute capability 8.0, not {dotted(capability)}"
    if capability is not None and layout.quantized == FP8 and capability < (8, 9):
        return f"needs compute capability 8.9 for {FP8} pages, not {dotted(capability)}"
    return None


def dotted(capability: tuple[int, int]) -> str:
    """A compute capability as NVIDIA writes it."""
    return ".".join(map(str, capability))


# One trace for all layers of a model, which differ in nothing static.
@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def attention(
    q: jax.Array,
    pages: KVPages,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    plan: Plan,
    sinks: jax.Array | None,
    options: AttentionOptions,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`ragged_paged_attention` in one launch, or in two if `split`."""
    _check_block(options.block_kv)
    _check_offsets(pages, options.layout)
    kv_heads = options.layout.local_kv_heads(pages)
    shape = ragged.Shape(options, q.shape[1] // kv_heads)
    items = plan.seq.shape[0]
    run = functools.partial(call, grid=(items, kv_heads), interpret=interpret)
    operands = (
        plan[:4],
        block_tables,
        kv_lens,
        cu_q_lens,
        q,
        pages,
        sinks_of_items(sinks, options),
    )
    body = functools.partial(ragged.kernel, shape=shape)
    if not options.split:
        out = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
        (answer,) = run(body, operands, name="attention_chunks", out=out, launch=options.launch)
        _, seen = row_positions(q.shape[0], kv_lens, cu_q_lens)
        return jnp.where((seen > 0)[:, None, None], answer, jnp.zeros((), q.dtype))
    per_row = (items, kv_heads, shape.live_rows)
    states = [
        jax.ShapeDtypeStruct(size, jnp.float32)
        for size in ((*per_row, options.layout.head_dim), per_row, per_row)
    ]
    parts = run(body, operands, name="attention_split", out=states, launch=options.launch)
    return _combined(q, kv_lens, cu_q_lens, plan, tuple(parts), sinks, shape.group, interpret)


def sinks_of_items(sinks: jax.Array | None, options: AttentionOptions) -> jax.Array | None:
    """The sinks that join in a work item: once per row, so not where several items share it."""
    return None if options.split else sinks


def _combined(
    q: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    plan: Plan,
    parts: tuple[jax.Array, ...],
    sinks: jax.Array | None,
    group: int,
    interpret: bool,
) -> jax.Array:
    seq, seen = row_positions(q.shape[0], kv_lens, cu_q_lens)
    token = jnp.arange(q.shape[0], dtype=jnp.int32) - cu_q_lens[seq]
    count = jnp.where(seen > 0, plan.count[seq], 0)
    (answer,) = call(
        functools.partial(combine.kernel, group=group),
        (plan.start[seq], count, token, parts, sinks),
        name="attention_combine",
        grid=q.shape[:2],
        out=[jax.ShapeDtypeStruct(q.shape, q.dtype)],
        launch=combine.LAUNCH,
        interpret=interpret,
    )
    return answer


@functools.partial(jax.jit, static_argnames=("layout", "interpret"))
def write(
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    pages: KVPages,
    layout: KVLayout,
    cos: jax.Array | None,
    sin: jax.Array | None,
    *,
    interpret: bool = False,
) -> KVPages:
    """`kv_write` in one launch, over the pages it is given."""
    _check_offsets(pages, layout)
    angles = None if cos is None else (cos, sin)
    leaves, tree = jax.tree.flatten(pages)
    operands = (slots, k, v, angles)
    out = call(
        functools.partial(writing.kernel, layout=layout),
        (*operands, pages),
        name="kv_write",
        grid=(k.shape[0],),
        out=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves],
        launch=writing.LAUNCH,
        interpret=interpret,
        aliases=written_over(len(jax.tree.leaves(operands)), len(leaves)),
    )
    return jax.tree.unflatten(tree, out)


def written_over(others: int, leaves: int) -> dict[int, int]:
    """Aliases of the pages, which follow the other operands: what is not written is kept."""
    return {others + i: i for i in range(leaves)}


def _check_block(block_kv: int) -> None:
    if block_kv < SMALLEST_PRODUCT or block_kv & (block_kv - 1):
        raise ValueError(
            f"block_kv={block_kv} is not a power of two of at least {SMALLEST_PRODUCT}, "
            "which the Triton kernels need"
        )


def most_pages(layout: KVLayout, pages: int) -> int:
    """The most pages of one layer's cache, `pages` or fewer, whose places are computed rightly.

    Pallas counts an array's elements in 64 bits once it exceeds 2^32 bytes, and in signed 32 bits
    below: only elements of one byte can be more than 2^31 and still in fewer bytes.
    """
    size = math.prod(layout.abstract(1).cells.shape)
    page_bytes = size * layout.storage_dtype.itemsize
    miscounted = pages * size > 2**31 and pages * page_bytes <= 2**32
    return 2**31 // size if miscounted else pages


def _check_offsets(pages: KVPages, layout: KVLayout) -> None:
    """Refuse a cache that `most_pages` would have made smaller."""
    local = dataclasses.replace(layout, num_kv_heads=layout.local_kv_heads(pages))
    held = layout.num_pages(pages)
    if held > (most := most_pages(local, held)):
        raise ValueError(
            f"{held} pages of a layer are {pages.cells.size} elements, which Pallas would count "
            f"wrongly; have at most {most} pages, or more than {2**32} bytes"
        )

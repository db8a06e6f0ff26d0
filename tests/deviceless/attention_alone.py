"""Compiles a write and the attention after it for a chip; prints what they use, as JSON.

    python -m tests.deviceless.attention_alone PLATFORM CHIP

One line per case of `CASES`; implementation and sizes are what "auto" chooses for the chip.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    KVLayout,
    KVPages,
    Use,
    items_bound,
    kv_write,
    make_plan,
    ragged_paged_attention,
    select,
    split_items_bound,
)
from pallas_kernels.tuning import sizes
from tests.deviceless import gpu, tpu
from tests.deviceless.summary import summary

SEQS, MAX_LEN, PAGE_SIZE, NUM_PAGES = 32, 2048, 16, 8193


@dataclass(frozen=True)
class Case:
    """A model's heads, and the rows of a call."""

    q_heads: int
    kv_heads: int
    head_dim: int
    rows: int
    split: bool
    window: int | None = None
    soft_cap: float | None = None
    quantized: str | None = None
    sinks: bool = False


CASES = {
    "smollm2-decode": Case(9, 3, 64, SEQS, split=True),
    "smollm2-chunk": Case(9, 3, 64, 512, split=False),
    "8b-decode": Case(32, 8, 128, SEQS, split=True),
    "8b-chunk": Case(32, 8, 128, 2048, split=False),
    "window-cap-decode": Case(16, 1, 128, SEQS, split=True, window=1024, soft_cap=30.0),
    "int8-decode": Case(32, 8, 128, SEQS, split=True, quantized="int8"),
    "int8-chunk": Case(32, 8, 128, 512, split=False, quantized="int8"),
    "sinks-decode": Case(64, 8, 64, SEQS, split=True, window=128, sinks=True),
}


def main() -> None:
    platform, chip = sys.argv[1:]
    target: Any = {"gpu": gpu, "tpu": tpu}[platform]
    device = target.topology(target.TARGETS[chip])[0]
    seen = {}
    for name, case in CASES.items():
        use = use_of(case, platform, target.TARGETS[chip])
        chosen, layout = select("auto", use)
        with target.described(target.TARGETS[chip]):
            arguments = gpu.placed(abstract(case, layout), device)
            call = partial(write_and_attend, case, layout, chosen.name, device.device_kind)
            compiled = jax.jit(call, donate_argnums=0).lower(*arguments).compile()
        shape = layout.abstract(NUM_PAGES).cells.shape
        seen[name] = summary(compiled, platform, shape) | {
            "attention": chosen.name,
            "cache_bytes": layout.page_bytes * NUM_PAGES,
        }
    print(json.dumps(seen))


def use_of(case: Case, platform: str, target: Any) -> Use:
    quantized = None if case.quantized is None else np.dtype(case.quantized)
    layout = KVLayout(
        np.dtype(jnp.bfloat16), case.kv_heads, case.head_dim, PAGE_SIZE, platform, quantized
    )
    capability = getattr(target, "capability", None)
    return Use(layout, case.q_heads // case.kv_heads, case.sinks, capability)


def abstract(case: Case, layout: KVLayout) -> tuple[Any, ...]:
    rows = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    return (
        layout.abstract(NUM_PAGES),
        rows((case.rows, case.q_heads, case.head_dim)),
        rows((case.rows, case.kv_heads, case.head_dim)),
        rows((case.rows, case.kv_heads, case.head_dim)),
        ints((case.rows,)),
        ints((SEQS, MAX_LEN // PAGE_SIZE)),
        ints((SEQS,)),
        ints((SEQS + 1,)),
        jax.ShapeDtypeStruct((case.q_heads,), jnp.float32),
    )


def write_and_attend(
    case: Case,
    layout: KVLayout,
    implementation: str,
    device_kind: str,
    pages: KVPages,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    tables: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    sinks: jax.Array,
) -> tuple[KVPages, jax.Array]:
    pages = kv_write(k, v, slots, pages, layout=layout, implementation=implementation)
    tuned = sizes(
        platform=layout.platform,
        device_kind=device_kind,
        head_dim=case.head_dim,
        group=case.q_heads // case.kv_heads,
        page_size=PAGE_SIZE,
        cell_dtype=str(layout.cell_dtype),
        max_len=MAX_LEN,
        table=None,
    )
    form = tuned.decode if case.split else tuned.prefill
    num_items = items_bound(case.rows, SEQS, form.block_q)
    if form.chunk_kv is not None:
        num_items = split_items_bound(SEQS, MAX_LEN, form.chunk_kv, case.window)
    plan = make_plan(
        kv_lens,
        cu_q_lens[1:] - cu_q_lens[:-1],
        num_items=num_items,
        block_q=form.block_q,
        chunk_kv=form.chunk_kv,
        window=case.window,
    )
    out = ragged_paged_attention(
        q,
        pages,
        tables,
        kv_lens,
        cu_q_lens,
        plan,
        layout=layout,
        sm_scale=case.head_dim**-0.5,
        split=case.split,
        block_q=form.block_q,
        block_kv=form.block_kv,
        window=case.window,
        soft_cap=case.soft_cap,
        sinks=sinks if case.sinks else None,
        launch=form.launch,
        implementation=implementation,
    )
    return pages, out


if __name__ == "__main__":
    main()

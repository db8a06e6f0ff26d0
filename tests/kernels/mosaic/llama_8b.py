"""The decode call of Llama-3-8B in shapes only: 32 query heads, 8 KV heads, 32 slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVLayout, KVPages, make_plan, ragged_paged_attention
from pallas_kernels.tuning import Launch

SEQS, Q_HEADS, KV_HEADS, CONTEXT, CHUNK_KV, BLOCK_KV = 32, 32, 8, 4096, 256, 64


@dataclass(frozen=True)
class Decode:
    """One form of the call."""

    head_dim: int = 128
    page_size: int = 16
    num_pages: int = 4096
    block_q: int = 1
    num_stages: int = 2
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def layout(self) -> KVLayout:
        return KVLayout(np.dtype(jnp.bfloat16), KV_HEADS, self.head_dim, self.page_size, "gpu")

    def arguments(self) -> tuple[Any, ...]:
        """Shapes and types of the call's arguments."""
        i32, of = jnp.int32, jax.ShapeDtypeStruct
        sinks = of((Q_HEADS,), jnp.float32) if self.sinks else None
        return (
            of((SEQS * self.block_q, Q_HEADS, self.head_dim), jnp.bfloat16),
            self.layout.abstract(self.num_pages),
            of((SEQS, CONTEXT // self.page_size), i32),
            of((SEQS,), i32),
            of((SEQS + 1,), i32),
            sinks,
        )

    def __call__(
        self,
        q: jax.Array,
        pages: KVPages,
        tables: jax.Array,
        kv_lens: jax.Array,
        cu_q_lens: jax.Array,
        sinks: jax.Array | None,
    ) -> jax.Array:
        plan = make_plan(
            kv_lens,
            cu_q_lens[1:] - cu_q_lens[:-1],
            num_items=SEQS * CONTEXT // CHUNK_KV,
            block_q=self.block_q,
            chunk_kv=CHUNK_KV,
            window=self.window,
        )
        return ragged_paged_attention(
            *(q, pages, tables, kv_lens, cu_q_lens, plan),
            layout=self.layout,
            sm_scale=self.head_dim**-0.5,
            split=True,
            block_q=self.block_q,
            block_kv=BLOCK_KV,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=sinks,
            launch=Launch(num_stages=self.num_stages),
            implementation="pallas_mgpu",
        )


FORMS = {
    "plain": Decode(),
    "wide-head": Decode(head_dim=256, page_size=64, num_pages=1024),
    "over-4GiB": Decode(page_size=64, num_pages=2**15 + 1),
    "everything": Decode(block_q=4, num_stages=3, window=1024, soft_cap=30.0, sinks=True),
}
"""Calls worth compiling."""

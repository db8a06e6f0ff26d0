"""The TPU implementation lowered for TPUs on a machine without one, and without libtpu."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import KVLayout, KVPages, kv_write, make_plan, ragged_paged_attention
from pallas_kernels.tpu_layout import tpu_layout

KINDS = ("TPU v5 lite", "TPU v6 lite", "TPU7x")
NUM_PAGES = 4097
NUM_SEQS = 32
PAGES_PER_SEQ = 128


def lowered(
    device_kind: str, heads: tuple[int, int, int], num_rows: int, *, split: bool, window: int | None
) -> str:
    """A write and the attention after it, the cache donated, as StableHLO."""
    q_heads, kv_heads, head_dim = heads
    plain = KVLayout(np.dtype(jnp.bfloat16), kv_heads, head_dim, 16, "tpu")
    layout = tpu_layout(plain)
    block_q = 1 if split else 128

    def run(
        pages: KVPages,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        slots: jax.Array,
        tables: jax.Array,
        kv_lens: jax.Array,
        cu: jax.Array,
    ) -> tuple[KVPages, jax.Array]:
        pages = kv_write(k, v, slots, pages, layout=layout, implementation="tpu")
        q_lens = cu[1:] - cu[:-1]
        plan = make_plan(kv_lens, q_lens, num_items=NUM_SEQS, block_q=block_q)
        out = ragged_paged_attention(
            q,
            pages,
            tables,
            kv_lens,
            cu,
            plan,
            layout=layout,
            sm_scale=head_dim**-0.5,
            split=split,
            block_q=block_q,
            block_kv=256,
            window=window,
            implementation="tpu",
        )
        return pages, out

    rows = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    ints = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    arguments = (
        layout.abstract(NUM_PAGES),
        rows((num_rows, q_heads, head_dim)),
        rows((num_rows, kv_heads, head_dim)),
        rows((num_rows, kv_heads, head_dim)),
        ints((num_rows,)),
        ints((NUM_SEQS, PAGES_PER_SEQ)),
        ints((NUM_SEQS,)),
        ints((NUM_SEQS + 1,)),
    )
    device = AbstractDevice(device_kind=device_kind, num_cores=1, platform="tpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(run, donate_argnums=0).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("device_kind", KINDS)
@pytest.mark.parametrize("split", [True, False], ids=["decode", "chunk"])
@pytest.mark.parametrize(
    ("heads", "window"), [((9, 3, 64), None), ((32, 8, 128), 1024)], ids=["smollm2", "8b"]
)
def test_one_kernel_reads_the_cache_that_was_written_in_place(
    device_kind: str, split: bool, heads: tuple[int, int, int], window: int | None
) -> None:
    num_rows = NUM_SEQS if split else 512
    text = lowered(device_kind, heads, num_rows, split=split, window=window)
    assert len(re.findall(r"custom_call @tpu_custom_call", text)) == 1
    combined = 2 * (4 if heads[1] == 3 else heads[1])
    cache = f"tensor<{NUM_PAGES}x16x{combined}x128xbf16>"
    assert re.search(rf"%arg0: {cache} \{{[^}}]*tf.aliasing_output = 0", text)
    # The write is all that makes an array of the cache's size.
    assert len(re.findall(rf"-> {cache}", text)) == text.count('"stablehlo.scatter"') == 1

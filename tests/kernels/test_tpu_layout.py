"""The TPU kernel's layout: padding, interleaving, and that no other code sees either."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import KVLayout, KVPages, kv_write, make_plan, ragged_paged_attention
from pallas_kernels.quantize import quantize
from pallas_kernels.tpu_layout import LANES, TPULayout, padded_kv_heads, tpu_layout
from tests.kernels.paged import (
    BLOCK_Q,
    CHUNK_ROWS,
    NUM_SEQS,
    Array,
    Config,
    error,
    expected,
    make_case,
    pages,
    same_bits,
)

BFLOAT16 = np.dtype(jnp.bfloat16)
SMOLLM2 = KVLayout(BFLOAT16, num_kv_heads=3, head_dim=64, page_size=16, platform="tpu")
SMALL = KVLayout(BFLOAT16, num_kv_heads=3, head_dim=8, page_size=2, platform="cpu")


def on_any(layout: KVLayout) -> KVLayout:
    """The TPU layout, cells stored as on the platform of `layout`."""
    return replace(tpu_layout(replace(layout, platform="tpu")), platform=layout.platform)


def as_tpu(layout: KVLayout, cells: Array, *, padding_of_free_cells: float = 0.0) -> Array:
    """Plain cells in the TPU layout, padding zero except in cells that hold that poison."""
    num_pages, _, kv_heads, _, head_dim = cells.shape
    out = np.zeros(layout.abstract(num_pages).cells.shape, layout.dtype)
    if padding_of_free_cells:
        # A cell is free if its first element is the poison.
        first = cells[:, 0, 0, :, 0].astype(np.float64)
        poison = np.array(padding_of_free_cells, layout.dtype).astype(np.float64)
        out[np.isnan(first) if np.isnan(poison) else first == poison] = padding_of_free_cells
    for part in (0, 1):
        moved = cells[:, part].swapaxes(1, 2)
        out[:, :, part : 2 * kv_heads : 2, :head_dim] = moved
    return out


@pytest.mark.parametrize(
    ("dtype", "heads", "padded"),
    [
        *[(BFLOAT16, n, p) for n, p in [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (24, 24)]],
        *[(np.dtype(np.float32), n, p) for n, p in [(1, 1), (3, 4), (5, 8), (9, 12)]],
    ],
)
def test_heads_are_padded_to_what_fills_tiles(dtype: np.dtype, heads: int, padded: int) -> None:
    assert padded_kv_heads(heads, dtype) == padded


def test_shapes_and_bytes_count_the_padding() -> None:
    layout = tpu_layout(SMOLLM2)
    assert layout.abstract(5).cells.shape == (5, 16, 2 * 4, 128)
    assert layout.page_bytes == 16 * 2 * 4 * 128 * 2 == SMOLLM2.page_bytes * 8 // 3
    assert tpu_layout(layout) is layout
    held = KVPages(jnp.zeros(layout.abstract(5).cells.shape, BFLOAT16))
    assert layout.num_pages(held) == 5
    assert layout.local_kv_heads(held) == 3


def test_heads_are_split_only_where_none_is_padding() -> None:
    layout = tpu_layout(replace(SMOLLM2, num_kv_heads=8))
    assert layout.partition_spec("tensor").cells == PartitionSpec(None, None, "tensor", None)
    cells = jnp.zeros(layout.abstract(5).cells.shape, BFLOAT16)
    assert layout.local_kv_heads(KVPages(cells[:, :, :4])) == 2
    with pytest.raises(ValueError, match="3 KV heads are padded to 4 and cannot be split"):
        tpu_layout(SMOLLM2).local_kv_heads(KVPages(cells[:, :, :4]))


def test_other_platforms_keep_their_layout() -> None:
    assert tpu_layout(SMALL) is SMALL


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)])
def test_what_is_written_is_read_bit_for_bit_and_the_padding_is_zero(
    dtype: np.dtype, platform: str
) -> None:
    layout = on_any(replace(SMALL, dtype=dtype, platform=platform))
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((6, 3, 8)).astype(dtype) for _ in range(2))
    like = layout.abstract(5).cells
    before = np.full(like.shape, np.nan, dtype)
    slots = np.array([9, -1, 2, 5, -7, 0], np.int32)

    @jax.jit
    def run(cells: jax.Array, k: jax.Array, v: jax.Array) -> tuple[KVPages, ...]:
        written = kv_write(k, v, slots, KVPages(cells), layout=layout, implementation="xla")
        numbers = jnp.arange(5)
        return written, layout.load(written, numbers), layout.load_one(written, 2)

    written, loaded, one = run(before.view(layout.storage_dtype), k, v)
    cells = np.asarray(written.cells).view(dtype)
    for part, new in enumerate((k, v)):
        got = np.asarray(loaded[part])  # [pages, kv_heads, page_size, head_dim]
        assert got.dtype == dtype
        assert same_bits(np.ascontiguousarray(got[2]), np.asarray(one[part]))
        for row, slot in enumerate(slots):
            if slot >= 0:
                page, offset = divmod(int(slot), 2)
                np.testing.assert_array_equal(got[page, :, offset], new[row])
                np.testing.assert_array_equal(cells[page, offset, part:6:2, :8], new[row])
                assert not cells[page, offset, 6:].any()
                assert not cells[page, offset, :, 8:].any()
    untouched = np.setdiff1d(np.arange(10), slots)
    assert np.isnan(cells.reshape(10, -1)[untouched].astype(np.float32)).all()


@pytest.mark.parametrize("cell", [np.int8, ml_dtypes.float8_e4m3fn])
def test_quantised_cells_and_scales_are_those_of_the_formula(cell: type) -> None:
    layout = on_any(replace(SMALL, quantized=np.dtype(cell)))
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((4, 3, 8)).astype(BFLOAT16) for _ in range(2))
    before = jax.tree.map(lambda x: jnp.full(x.shape, 77, x.dtype), layout.abstract(2))
    slots = jnp.arange(4)
    write = jax.jit(lambda p: kv_write(k, v, slots, p, layout=layout, implementation="xla"))
    written = write(before)
    cells = np.asarray(written.cells).view(layout.cell_dtype).reshape(4, -1, LANES)
    scales = np.asarray(written.scales).reshape(4, -1)
    for part, new in enumerate((k, v)):
        want_cells, want_scales = quantize(jnp.asarray(new), layout.cell_dtype)
        assert same_bits(cells[:, part:6:2, :8].copy(), np.asarray(want_cells))
        assert same_bits(scales[:, part:6:2].copy(), np.asarray(want_scales))
        loaded = np.asarray(layout.load_one(written, jnp.int32(1))[part]).swapaxes(0, 1)
        want = np.asarray(want_cells, np.float32) * np.asarray(want_scales)[..., None]
        np.testing.assert_array_equal(loaded, want[2:])
    assert layout.page_bytes == 2 * 8 * (LANES + 4)
    assert layout.partition_spec("tensor").scales == PartitionSpec(None, None, "tensor")


def test_a_donated_cache_is_written_in_place() -> None:
    layout = on_any(SMALL)
    pages_held = layout.abstract(512)
    row = jax.ShapeDtypeStruct((6, 3, 8), BFLOAT16)
    slots = jax.ShapeDtypeStruct((6,), jnp.int32)
    write = jax.jit(lambda p, k, v, s: kv_write(k, v, s, p, layout=layout), donate_argnums=0)
    memory = write.lower(pages_held, row, row, slots).compile().memory_analysis()
    assert memory.alias_size_in_bytes == layout.page_bytes * 512
    assert memory.temp_size_in_bytes < layout.page_bytes * 512 / 8


def test_copying_pages_copies_all_of_them() -> None:
    layout = on_any(SMALL)
    like = layout.abstract(5).cells
    cells = np.arange(np.prod(like.shape)).reshape(like.shape).astype(like.dtype)
    source, target = np.array([1, 3, 2]), np.array([3, 2, -1])
    after = np.asarray(jax.jit(layout.copy_pages)(KVPages(cells), source, target).cells)
    want = cells.copy()
    want[[3, 2]] = cells[[1, 3]]
    np.testing.assert_array_equal(after, want)


@pytest.mark.parametrize("split", [True, False], ids=["decode", "chunk"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_xla_implementation_reads_it_too(platform: str, split: bool) -> None:
    config = Config(9, 3, 64, 16, "float32", quick=True)
    layout = on_any(config.layout(platform))
    assert isinstance(layout, TPULayout)

    @jax.jit
    def run(
        q: jax.Array, cells: jax.Array, tables: jax.Array, kv_lens: jax.Array, cu: jax.Array
    ) -> jax.Array:
        chunk_kv = 64 if split else None
        block_q = NUM_SEQS if split else BLOCK_Q
        q_lens = cu[1:] - cu[:-1]
        plan = make_plan(kv_lens, q_lens, num_items=64, block_q=block_q, chunk_kv=chunk_kv)
        return ragged_paged_attention(
            q,
            KVPages(cells),
            tables,
            kv_lens,
            cu,
            plan,
            layout=layout,
            sm_scale=0.125,
            split=split,
            block_q=block_q,
            block_kv=32,
            implementation="xla",
        )

    rng = np.random.default_rng(0)
    for seed in range(20):
        kv_lens = rng.integers(0, config.longest + 1, NUM_SEQS)
        kv_lens[rng.integers(NUM_SEQS)] = 0
        num_rows = NUM_SEQS if split else CHUNK_ROWS
        q_lens = np.minimum(kv_lens, rng.integers(0, CHUNK_ROWS // NUM_SEQS + 1, NUM_SEQS))
        q_lens = np.ones(NUM_SEQS, int) if split else q_lens
        case = make_case(config, kv_lens.tolist(), q_lens.tolist(), num_rows, seed)
        plain, tables = pages(config, case, poison=np.nan)
        held = as_tpu(layout, plain, padding_of_free_cells=np.nan)
        got = np.asarray(run(case.q, held, tables, case.kv_lens, case.cu_q_lens))
        assert error(got, expected(config, case)) < 2e-5

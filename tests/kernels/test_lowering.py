"""The Triton kernels lowered for CUDA, for chips that are not here.

Imports little, so that it runs wherever jax and pytest are: on every version of JAX that the
kernels support.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pallas_kernels import KVLayout, Plan, kv_write, make_plan, ragged_paged_attention

CHIPS = ["NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"]
H200 = CHIPS[2]
NAMES_A_CHIP = hasattr(jax.sharding, "AbstractDevice") and jax.__version_info__ >= (0, 11)
"""Before JAX 0.11 a kernel is lowered for compute capability 9.0 where there is no GPU."""
KERNEL = "__gpu$xla.gpu.triton"
FP8 = "float8_e4m3fn"
SEQS, PAGES_PER_SEQ, ITEMS, CHUNK_KV = 64, 256, 256, 256
i32, f32 = jnp.int32, jnp.float32


@dataclass(frozen=True)
class Shape:
    """An attention call; by default Llama-3-8B's."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    pages: int = 20_000
    dtype: str = "bfloat16"
    quantized: str | None = None
    block_q: int = 1
    block_kv: int = 64
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        cells = self.dtype if self.quantized is None else self.quantized
        heads = f"{self.q_heads}x{self.kv_heads}x{self.head_dim}"
        return f"{heads}-{cells}-page{self.page_size}x{self.pages}-window{self.window}"

    @property
    def layout(self) -> KVLayout:
        cells = None if self.quantized is None else np.dtype(jnp.dtype(self.quantized))
        sizes = (self.kv_heads, self.head_dim, self.page_size)
        return KVLayout(np.dtype(jnp.dtype(self.dtype)), *sizes, "gpu", cells)


LLAMA = Shape()
RATIOS = [(1, 1), (4, 4), (8, 1), (32, 1), (14, 2), (9, 3), (12, 4)]
SHAPES = [
    LLAMA,
    Shape(pages=100_000),  # 6.5 GB
    Shape(quantized="int8"),
    Shape(quantized="int8", pages=140_000),
    Shape(quantized=FP8),
    Shape(dtype="float32", block_kv=32),
    Shape(dtype="float16", quantized="int8", page_size=128),
    Shape(16, 8, 256, block_q=5, block_kv=32, window=1024, soft_cap=50.0, sinks=True),
    *[Shape(*heads, size) for heads in RATIOS for size in (32, 64, 80, 128)],
]


def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def of_chip(chip: str) -> dict[str, Any]:
    """What tells a mesh its devices."""
    if not NAMES_A_CHIP:
        return {}
    device = jax.sharding.AbstractDevice(device_kind=chip, num_cores=None, platform="gpu")
    return {"abstract_device": device}


def lowered(function: Callable[..., Any], *arguments: Any, chip: str = H200) -> str:
    """StableHLO of the function for a CUDA device, its first argument donated."""
    where: Any = contextlib.nullcontext()
    if NAMES_A_CHIP:
        where = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), **of_chip(chip)))
    with where:
        traced = jax.jit(function, donate_argnums=0).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> dict[str, tuple[int, int]]:
    """Grid of each kernel by name."""
    calls = [line for line in text.splitlines() if KERNEL in line]
    found = {}
    for line in calls:
        name = re.search(r'name = "(\w+)"', line)
        grid = re.search(r"grid_x = (\d+) .*grid_y = (\d+) .*grid_z = 1 ", line)
        assert name, line[:200]
        assert grid, line[:200]
        found[name[1]] = (int(grid[1]), int(grid[2]))
    assert len(found) == len(calls)
    return found


def attention(shape: Shape, split: bool, rows: int, chip: str = H200) -> str:
    def run(pages: Any, q: Any, tables: Any, kv_lens: Any, cu: Any, plan: Plan, sinks: Any) -> Any:
        return pages, ragged_paged_attention(
            q,
            pages,
            tables,
            kv_lens,
            cu,
            plan,
            layout=shape.layout,
            sm_scale=shape.head_dim**-0.5,
            split=split,
            block_q=shape.block_q,
            block_kv=shape.block_kv,
            window=shape.window,
            soft_cap=shape.soft_cap,
            sinks=sinks,
            implementation="pallas_triton",
        )

    lens = abstract((SEQS,), i32)
    plan = jax.eval_shape(
        functools.partial(
            make_plan,
            num_items=ITEMS,
            block_q=shape.block_q,
            chunk_kv=CHUNK_KV if split else None,
            window=shape.window,
        ),
        lens,
        lens,
    )
    return lowered(
        run,
        shape.layout.abstract(shape.pages),
        abstract((rows, shape.q_heads, shape.head_dim), shape.dtype),
        abstract((SEQS, PAGES_PER_SEQ), i32),
        lens,
        abstract((SEQS + 1,), i32),
        plan,
        abstract((shape.q_heads,), f32) if shape.sinks else None,
        chip=chip,
    )


def write(shape: Shape, rows: int = 64, rotate: bool = True, chip: str = H200) -> str:
    def run(pages: Any, k: Any, v: Any, slots: Any, cos: Any, sin: Any) -> Any:
        how: Any = {"layout": shape.layout, "implementation": "pallas_triton"}
        return kv_write(k, v, slots, pages, cos=cos, sin=sin, **how)

    new = abstract((rows, shape.kv_heads, shape.head_dim), shape.dtype)
    angles = abstract((rows, shape.head_dim // 2), f32) if rotate else None
    pages = shape.layout.abstract(shape.pages)
    return lowered(run, pages, new, new, abstract((rows,), i32), angles, angles, chip=chip)


def cache_sized(shape: Shape, text: str) -> set[str]:
    """Operations whose result is as large as the cache or its scales."""
    layout = shape.layout.abstract(shape.pages)
    sizes = {math.prod(x.shape) for x in jax.tree.leaves(layout)}
    found = set()
    for line in text.splitlines():
        operation = re.match(r"\s*%\S+ = (\S+)", line)
        results = re.findall(
            r"tensor<([\dx]+)x\w+>", line.rsplit("->" if "->" in line else ":")[-1]
        )
        if operation and any(math.prod(map(int, r.split("x"))) in sizes for r in results):
            found.add(operation[1].split("(")[0])
    return found


def refuses_chip(shape: Shape, chip: str) -> bool:
    return NAMES_A_CHIP and shape.quantized == FP8 and "A100" in chip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_is_one_launch_over_items_and_one_over_rows(shape: Shape) -> None:
    rows = SEQS * shape.block_q
    text = attention(shape, True, rows)
    assert list(kernels(text).values()) == [(ITEMS, shape.kv_heads), (rows, shape.q_heads)]
    assert not cache_sized(shape, text), "the cache is copied"


@pytest.mark.parametrize("shape", SHAPES[:8], ids=str)
def test_a_chunk_is_one_launch_over_items(shape: Shape) -> None:
    shape = Shape(**{**shape.__dict__, "block_q": 16})
    text = attention(shape, False, 2048)
    assert list(kernels(text).values()) == [(ITEMS, shape.kv_heads)]
    assert not cache_sized(shape, text), "the cache is copied"


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("quantized", [None, "int8", FP8])
def test_every_chip(chip: str, quantized: str | None) -> None:
    shape = Shape(quantized=quantized)
    if refuses_chip(shape, chip):
        with pytest.raises(NotImplementedError, match="cannot cast from"):
            attention(shape, True, SEQS, chip)
        with pytest.raises(NotImplementedError, match="cannot cast to"):
            write(shape, chip=chip)
        return
    assert len(kernels(attention(shape, True, SEQS, chip))) == 2
    assert len(kernels(attention(shape, False, 2048, chip))) == 1
    assert len(kernels(write(shape, chip=chip))) == 1


def check_written_over(shape: Shape, rows: int, rotate: bool) -> None:
    text = write(shape, rows, rotate)
    assert list(kernels(text).values()) == [(rows, 1)]
    (call,) = [line for line in text.splitlines() if KERNEL in line]
    leaves = jax.tree.leaves(shape.layout.abstract(shape.pages))
    assert call.count("#stablehlo.output_operand_alias<") == len(leaves)
    assert text.count("tf.aliasing_output") == len(leaves), "the cache is not donated"
    assert cache_sized(shape, text) <= {"stablehlo.custom_call", "call"}, "the cache is copied"


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("shape", [*SHAPES[:8], Shape(9, 3, 80), Shape(9, 3, 64)], ids=str)
def test_a_write_is_one_launch_over_the_donated_pages(shape: Shape, rotate: bool) -> None:
    check_written_over(shape, 64, rotate)


def test_a_write_of_a_chunk_is_one_launch_too() -> None:
    check_written_over(LLAMA, 2048, True)


def test_layers_share_one_kernel() -> None:
    """It is traced and lowered once, however many layers a model has."""

    def layers(pages: Any, k: Any, slots: Any) -> Any:
        how: Any = {"layout": LLAMA.layout, "implementation": "pallas_triton"}
        return [kv_write(k, k, slots, x, **how) for x in pages]

    new = abstract((64, LLAMA.kv_heads, LLAMA.head_dim), LLAMA.dtype)
    pages = [LLAMA.layout.abstract(LLAMA.pages)] * 3
    text = lowered(layers, pages, new, abstract((64,), i32))
    assert list(kernels(text)) == ["kv_write"]
    assert text.count("call @write(") == len(pages)


def test_a_mesh_divides_the_heads() -> None:
    """Under `shard_map` each device's kernel has its own KV heads."""
    axes: Any = {"axis_types": (jax.sharding.AxisType.Auto,), **of_chip(H200)}
    mesh = jax.sharding.AbstractMesh((2,), ("tensor",), **axes)
    spec, heads = LLAMA.layout.partition_spec("tensor"), PartitionSpec(None, "tensor")

    def shard(pages: Any, k: Any, slots: Any) -> Any:
        how: Any = {"layout": LLAMA.layout, "implementation": "pallas_triton"}
        return kv_write(k, k, slots, pages, **how)

    split = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(spec, heads, PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
    new = abstract((64, LLAMA.kv_heads, LLAMA.head_dim), LLAMA.dtype)
    text = lowered(split, LLAMA.layout.abstract(LLAMA.pages), new, abstract((64,), i32))
    (call,) = [line for line in text.splitlines() if KERNEL in line]
    assert f"-> tensor<{LLAMA.pages}x2x4x16x128xbf16>" in call


@pytest.mark.parametrize("pages", [70_000, 130_000])
def test_eight_bit_pools_whose_offsets_would_overflow_are_refused(pages: int) -> None:
    """Pallas counts an element's place in signed 32 bits up to arrays of 2^32 bytes."""
    shape = Shape(quantized="int8", pages=pages)
    for operation in (functools.partial(attention, shape, True, SEQS), lambda: write(shape)):
        with pytest.raises(
            ValueError,
            match=f"{pages} pages of a layer are {pages << 15} elements.* at most 65536 pages",
        ):
            operation()


@pytest.mark.parametrize("block_kv", [8, 48])
def test_blocks_of_keys_that_no_product_takes_are_refused(block_kv: int) -> None:
    with pytest.raises(ValueError, match=f"block_kv={block_kv} is not a power of two of at least"):
        attention(Shape(block_kv=block_kv), True, SEQS)


def test_lowering_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """JAX warns of Triton's end each time; that is for the kernels' authors to know."""
    attention(Shape(pages=17), True, SEQS)
    write(Shape(pages=17))
    assert not recwarn.list

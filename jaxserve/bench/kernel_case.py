"""One cell of the sweep as arrays, and the calls over them that are chained and timed.

Knows the kernels' interface.  Does not know how results are compared or shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxserve.bench.chained import Body, fed_back
from jaxserve.bench.roofline import Cell, Heads, floor_bytes
from pallas_kernels import (
    NULL_PAGE,
    KVLayout,
    KVPages,
    items_bound,
    kv_write,
    make_plan,
    ragged_paged_attention,
    split_items_bound,
)
from pallas_kernels.quantize import CELL_DTYPES
from pallas_kernels.tuning import Tuned

_DTYPE = np.dtype(ml_dtypes.bfloat16)
_plan = jax.jit(make_plan, static_argnames=("num_items", "block_q", "chunk_kv"))
_DISTINCT_PAGES = 64
"""Pages of different random numbers; the cache repeats them."""


def plain_layout(cell: Cell, heads: Heads, platform: str) -> KVLayout:
    """The layout of a cell's cache, before an implementation changes it."""
    return KVLayout(
        dtype=_DTYPE,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        page_size=cell.page_size,
        platform=platform,
        quantized=CELL_DTYPES.get(cell.kv_dtype),
    )


@dataclass(frozen=True)
class Case:
    """A cell with its pages dealt out: several copies of it, if one would fit the L2 cache."""

    cell: Cell
    heads: Heads
    copies: int
    """Calls take turns with so many sets of pages, so that none is read from the L2 cache."""

    @classmethod
    def make(cls, cell: Cell, heads: Heads, working_set_bytes: int) -> Case:
        """A case whose copies together have at least `working_set_bytes`."""
        return cls(cell, heads, max(1, -(-working_set_bytes // floor_bytes(cell, heads))))

    @property
    def kv_lens(self) -> npt.NDArray[np.int32]:
        """Keys of each sequence."""
        return np.array(self.cell.kv_lens(), np.int32)

    @property
    def pages_per_copy(self) -> int:
        """Pages of all sequences together."""
        if self.cell.op == "write":
            return -(-self.cell.batch // self.cell.page_size)
        return int((-(-self.kv_lens // self.cell.page_size)).sum())

    @property
    def num_pages(self) -> int:
        """Pages of the cache, the null page included."""
        return 1 + self.copies * self.pages_per_copy

    def tables(self) -> npt.NDArray[np.int32]:  # [copies, batch, pages_per_seq]
        """Block tables of every copy; a sequence's pages lie anywhere."""
        counts = -(-self.kv_lens // self.cell.page_size)
        pages = np.random.default_rng(0).permutation(self.num_pages - 1).astype(np.int32) + 1
        width = -(-self.cell.context // self.cell.page_size)
        tables = np.full((self.copies, self.cell.batch, width), NULL_PAGE, np.int32)
        mine = np.broadcast_to(np.arange(width) < counts[:, None], tables.shape)
        tables[mine] = pages
        return tables

    def slots(self) -> npt.NDArray[np.int32]:  # [copies, batch]
        """Cells that each copy of a write writes to, anywhere in the cache."""
        size = self.cell.page_size
        cells = np.random.default_rng(0).permutation((self.num_pages - 1) * size) + size
        count = self.copies * self.cell.batch
        return cells[:count].reshape(self.copies, self.cell.batch).astype(np.int32)


def random_pages(layout: KVLayout, num_pages: int) -> KVPages:
    """A cache of random numbers, no page of which is zero or not a number."""
    few = min(num_pages, _DISTINCT_PAGES)
    shape = (few * layout.page_size, layout.num_kv_heads, layout.head_dim)
    k, v = (random_rows(*shape, seed) for seed in (0, 1))

    def make(k: jax.Array, v: jax.Array) -> KVPages:
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.abstract(few))
        some = layout.store(empty, k, v, jnp.arange(shape[0], dtype=jnp.int32))
        number = jnp.arange(num_pages, dtype=jnp.int32) % few
        return KVPages(*jax.tree.map(lambda x: x[number], some))

    pages: KVPages = jax.jit(make)(k, v)
    return pages


def random_rows(rows: int, num_heads: int, head_dim: int, seed: int) -> jax.Array:
    """Queries, keys or values of some tokens; made on the host, so that nothing is compiled."""
    numbers = np.random.default_rng(seed).standard_normal((rows, num_heads, head_dim), np.float32)
    return jnp.asarray(numbers.astype(_DTYPE))


@dataclass(frozen=True)
class Program:
    """What is chained for one implementation: the body and its arguments."""

    body: Body
    carry: Any
    """Shapes of the donated arrays."""
    operands: Any
    """Shapes of the others."""
    once: Callable[[Any, Any], Any]
    """The call alone, over the first set of pages, from the same arguments."""


def attention_program(case: Case, implementation: str, layout: KVLayout, tuned: Tuned) -> Program:
    """Attention with queries that depend on the call before; see `attention_operands`."""
    split = case.cell.op == "decode"
    options: dict[str, Any] = {
        "layout": layout,
        "sm_scale": layout.head_dim**-0.5,
        "split": split,
        "block_q": tuned.block_q,
        "block_kv": tuned.block_kv,
        "launch": tuned.launch,
        "implementation": implementation,
    }

    def call(i: jax.Array, q: jax.Array, operands: Any) -> jax.Array:
        pages, tables, kv_lens, cu_q_lens, plan = operands
        mine = tables[i % case.copies] if case.copies > 1 else tables[0]
        return ragged_paged_attention(q, pages, mine, kv_lens, cu_q_lens, plan, **options)

    operands = jax.eval_shape(lambda: attention_operands(case, layout, tuned, pages=None))
    return Program(
        once=partial(call, jnp.int32(0)),
        body=fed_back(call),
        carry=jax.eval_shape(lambda: queries(case)),
        operands=(layout.abstract(case.num_pages), *operands[1:]),
    )


def queries(case: Case) -> jax.Array:
    """The first call's queries."""
    rows = case.cell.batch * case.cell.q_len
    return random_rows(rows, case.heads.num_heads, case.heads.head_dim, seed=2)


def attention_operands(
    case: Case,
    layout: KVLayout,
    tuned: Tuned,
    pages: Any,
    kv_lens: npt.NDArray[np.int32] | None = None,
) -> Any:
    """Pages, tables, lengths and plan as `attention_program` takes them.

    Args:
        case: the cell.
        layout: of its pages.
        tuned: sizes that the plan is made for.
        pages: the cache.
        kv_lens: lengths instead of the case's, none longer than those.
    """
    cell = case.cell
    lens = case.kv_lens if kv_lens is None else kv_lens
    rows = cell.batch * cell.q_len
    num_items = items_bound(rows, cell.batch, tuned.block_q)
    if cell.op == "decode":
        assert tuned.chunk_kv is not None
        num_items = split_items_bound(cell.batch, cell.context, tuned.chunk_kv, None)
    plan = _plan(
        lens,
        np.full(cell.batch, cell.q_len, np.int32),
        num_items=num_items,
        block_q=tuned.block_q,
        chunk_kv=tuned.chunk_kv if cell.op == "decode" else None,
    )
    cu_q_lens = jnp.asarray(np.arange(cell.batch + 1, dtype=np.int32) * cell.q_len)
    return pages, jnp.asarray(case.tables()), jnp.asarray(lens), cu_q_lens, plan


def write_program(case: Case, implementation: str, layout: KVLayout) -> Program:
    """Writes to cells all over the cache, rotary embedding included; see `write_operands`."""

    def body(i: jax.Array, pages: KVPages, operands: Any) -> KVPages:
        k, v, cos, sin, slots = operands
        mine = slots[i % case.copies]
        return kv_write(
            k, v, mine, pages, layout=layout, cos=cos, sin=sin, implementation=implementation
        )

    return Program(
        once=partial(body, jnp.int32(0)),
        body=body,
        carry=layout.abstract(case.num_pages),
        operands=jax.eval_shape(lambda: write_operands(case)),
    )


def write_operands(case: Case) -> Any:
    """Keys, values, angles and cells as `write_program` takes them."""
    rows, heads = case.cell.batch, case.heads
    k, v = (random_rows(rows, heads.num_kv_heads, heads.head_dim, seed) for seed in (3, 4))
    angle = np.linspace(0, 3, rows * heads.head_dim // 2, dtype=np.float32).reshape(rows, -1)
    return k, v, jnp.asarray(np.cos(angle)), jnp.asarray(np.sin(angle)), jnp.asarray(case.slots())

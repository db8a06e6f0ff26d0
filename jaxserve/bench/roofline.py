"""What attention over pages has to move and to compute: the floor that its time is compared with.

Formulas of one layer, from sizes alone.  Does not know how anything is timed.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.bench.lengths import make_lengths

OPS = ("decode", "prefill", "write")
KV_BYTES = {"bfloat16": 2, "int8": 1, "fp8": 1}
"""Bytes of an element of the cache by the name of `--kv-cache-dtype`."""
_MODEL_BYTES = 2
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Heads:
    """The attention heads of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


SHAPES = {
    "8b": Heads(32, 8, 128),
    "0.6b": Heads(16, 8, 128),
    "smollm2-135m": Heads(9, 3, 64),
}
"""Llama-3-8B, Qwen3-0.6B and the demo model."""


@dataclass(frozen=True)
class Cell:
    """One point of the sweep."""

    op: str
    """decode: a query token for each sequence; prefill: `chunk` of them, spread evenly; write:
    keys and values of `batch` tokens."""
    batch: int
    """Sequences; tokens of a write."""
    context: int
    """Keys of the longest sequence, the queries' own included; of no meaning for a write."""
    mix: str
    kv_dtype: str
    page_size: int
    chunk: int = 2048
    """Query tokens of a prefill."""

    def __post_init__(self) -> None:
        if self.op == "prefill" and (self.chunk % self.batch or self.q_len > self.context):
            raise ValueError(
                f"a prefill of {self.chunk} tokens needs a batch that divides it and a context of "
                f"at least its share, not batch={self.batch} and context={self.context}"
            )

    @property
    def q_len(self) -> int:
        """Query tokens of each sequence."""
        return self.chunk // self.batch if self.op == "prefill" else 1

    def kv_lens(self) -> list[int]:
        """Keys of each sequence, its queries' own included."""
        lengths = make_lengths(self.mix, self.batch, self.context)
        return [max(length, self.q_len) for length in lengths]


def floor_bytes(cell: Cell, heads: Heads) -> int:
    """Bytes that any implementation moves: each key, value, scale, query and result once."""
    token = 2 * heads.num_kv_heads * heads.head_dim
    scales = 0 if cell.kv_dtype == "bfloat16" else 2 * heads.num_kv_heads * _SCALE_BYTES
    cached = token * KV_BYTES[cell.kv_dtype] + scales
    if cell.op == "write":
        return cell.batch * (token * _MODEL_BYTES + cached)
    rows = cell.batch * cell.q_len
    queries = 2 * rows * heads.num_heads * heads.head_dim * _MODEL_BYTES
    return sum(cell.kv_lens()) * cached + queries


def split_bytes(cell: Cell, heads: Heads, chunk_kv: int) -> int:
    """Bytes that splitting the keys of a decode adds: float32 partials, written and read."""
    items = sum(-(-length // chunk_kv) for length in cell.kv_lens())
    return 2 * items * heads.num_heads * (heads.head_dim + 2) * 4


def flops(cell: Cell, heads: Heads) -> int:
    """Floating-point operations of both products, the causal half of a prefill only."""
    if cell.op == "write":
        return 0
    before = sum(cell.kv_lens()) - cell.batch * cell.q_len
    pairs = cell.q_len * before + cell.batch * cell.q_len * (cell.q_len + 1) // 2
    return 4 * heads.num_heads * heads.head_dim * pairs

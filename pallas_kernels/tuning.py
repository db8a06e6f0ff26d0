"""Sizes that decide a kernel's speed and never its meaning.

Measured ones come from a table that a tuner has written (`pallas_kernels.tuned_table`); the
defaults here are for what no table knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pallas_kernels.tuned_table import TunedTable

MAX_CHUNKS = 64
"""Most work items that the keys of one sequence are split into: a bound for the plan's size."""
_CHUNK_KV = 256
_PREFILL_ROWS = 128
"""Query rows of a prefill block, where the registers suffice."""
_XLA_BLOCK_Q = {"cpu": 64}
"""Query tokens of a work item of the XLA chunk form: few large ones where launches cost most."""
_XLA_BLOCK_KV = 256


@dataclass(frozen=True)
class Launch:
    """How a GPU kernel is launched; other implementations ignore it."""

    num_warps: int = 4
    """Warps of 32 threads per program."""
    num_stages: int = 2
    """Blocks of keys in flight at once (software pipelining)."""


DEFAULT_LAUNCH = Launch()


@dataclass(frozen=True)
class Tuned:
    """Sizes of one form of attention."""

    block_q: int
    """Query tokens of a work item."""
    block_kv: int
    """Keys visited at once."""
    chunk_kv: int | None
    """Keys of a work item; `None` for all of them."""
    launch: Launch = DEFAULT_LAUNCH


@dataclass(frozen=True)
class Sizes:
    """Sizes of the two forms of attention that an engine runs."""

    decode: Tuned
    """Of the split form; `block_q` is 1, and a caller with more rows per sequence raises it."""
    prefill: Tuned
    """Of the unsplit form; `chunk_kv` is `None`."""


def sizes(
    platform: str,
    device_kind: str,
    head_dim: int,
    group: int,
    page_size: int,
    cell_dtype: str,
    max_len: int,
    table: TunedTable | None,
) -> Sizes:
    """Sizes for a device and a model: from `table` where it has them, else the defaults.

    Args:
        platform: "cpu", "gpu" or "tpu"; a table counts on GPUs only.
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H200".
        head_dim: elements per head.
        group: query heads per KV head.
        page_size: token positions per page.
        cell_dtype: name of `KVLayout.cell_dtype`, such as "bfloat16" or "int8".
        max_len: longest sequence; `chunk_kv` is raised until its keys are at most `MAX_CHUNKS`
            work items.
        table: measured sizes, or `None`.

    Implementations in plain XLA want larger blocks than kernels: see `xla_sizes`.
    """
    if platform != "gpu":
        return xla_sizes(platform, page_size, max_len)
    found: list[Tuned] = []
    for op in ("decode", "prefill"):
        tuned = None
        if table is not None:
            tuned = table.lookup(device_kind, op, head_dim, group, page_size, cell_dtype)
        found.append(tuned or default(op, device_kind, head_dim, group, page_size, cell_dtype))
    decode, prefill = found
    assert decode.chunk_kv is not None
    chunk_kv = _chunk(decode.chunk_kv, decode.block_kv, max_len)
    return Sizes(Tuned(1, decode.block_kv, chunk_kv, decode.launch), prefill)


def xla_sizes(platform: str, page_size: int, max_len: int) -> Sizes:
    """Sizes for the implementations in plain XLA, which visit whole pages in large blocks."""
    block_kv = page_size * max(1, _XLA_BLOCK_KV // page_size)
    return Sizes(
        decode=Tuned(1, block_kv, _chunk(_CHUNK_KV, block_kv, max_len)),
        prefill=Tuned(_XLA_BLOCK_Q.get(platform, 128), block_kv, None),
    )


def default(
    op: str, device_kind: str, head_dim: int, group: int, page_size: int, cell_dtype: str
) -> Tuned:
    """Sizes of a GPU kernel that nobody has measured: `op` is "decode" or "prefill".

    Large enough for the matrix units and small enough for the shared memory and, in 16 and 8
    bits, for the registers: compiled for an A100 and an H200, none of those spills with up to 16
    query heads per KV head.
    """
    width = np.dtype(_plain(cell_dtype)).itemsize
    wide = head_dim >= 256 or width >= 4
    ampere = "A100" in device_kind
    block_kv = _whole_or_part(32 if wide else 64, page_size)
    num_stages = 2 if wide or ampere else 3
    if op == "decode":
        return Tuned(1, block_kv, max(_CHUNK_KV, block_kv), Launch(4, num_stages))
    rows = _PREFILL_ROWS // 4 if width >= 4 else _PREFILL_ROWS // (2 if wide or ampere else 1)
    return Tuned(max(1, rows // group), block_kv, None, Launch(8, num_stages))


def group_bucket(group: int) -> int:
    """The power of two that tables file a number of query heads per KV head under."""
    return power_of_two(group)


def power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << max(0, least - 1).bit_length()


def _chunk(chunk_kv: int, block_kv: int, max_len: int) -> int:
    """`chunk_kv`, raised to a block of keys and so that `max_len` keys are few enough items."""
    return max(chunk_kv, block_kv, power_of_two(-(-max_len // MAX_CHUNKS)))


def _whole_or_part(block_kv: int, page_size: int) -> int:
    """`block_kv` if it and the page divide one another, else whole pages near it."""
    if block_kv % page_size == 0 or page_size % block_kv == 0:
        return block_kv
    return page_size * max(1, block_kv // page_size)


def _plain(cell_dtype: str) -> str:
    """A NumPy type as wide as `cell_dtype`, which NumPy may not know by name."""
    widths = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
    return widths.get(cell_dtype, cell_dtype)

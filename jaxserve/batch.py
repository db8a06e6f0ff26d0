"""From a step plan to one fixed-shape int32 array: the seam where nothing can recompile.

`pack_batch` is a pure NumPy function of the plan; `BatchLayout.unpack` is its inverse on the
device.  Tokens of decoding sequences are not in it: the device fed them back to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.shapes import StepShape
from scheduler import StepPlan

DECODES = 1
"""Row flag: the sequence computes its one token in its sequence row."""
SAMPLES = 2
"""Row flag: the step samples the sequence's next token."""


class Batch(NamedTuple):
    """One step's work on the device."""

    slot: jax.Array  # i32[rows], num_slots for an unused row
    start: jax.Array  # i32[rows], position of the first token computed
    length: jax.Array  # i32[rows], tokens computed; 0 for an unused row
    flags: jax.Array  # i32[rows], DECODES and SAMPLES
    last: jax.Array  # i32[rows], model row of the last token computed
    token: jax.Array  # i32[chunk]
    position: jax.Array  # i32[chunk]
    row: jax.Array  # i32[chunk], sequence row of a chunk token; `rows` for padding
    page_slot: jax.Array  # i32[deltas], block-table entries to change; num_slots for none
    page_index: jax.Array  # i32[deltas]
    page: jax.Array  # i32[deltas]


@dataclass(frozen=True)
class BatchLayout:
    """Where the parts of a batch lie in its packed array."""

    shape: StepShape
    num_slots: int
    page_size: int

    @property
    def num_deltas(self) -> int:
        """Most pages that one step can add to block tables.

        A run of tokens touches at most one page more than it fills.
        """
        return 2 * self.shape.rows + self.shape.chunk // self.page_size

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each part."""
        rows, chunk, deltas = self.shape.rows, self.shape.chunk, self.num_deltas
        return (rows,) * 5 + (chunk,) * 3 + (deltas,) * 3

    @property
    def packed_size(self) -> int:
        """Length of the packed array."""
        return sum(self.lengths)

    def unpack(self, packed: jax.Array) -> Batch:
        """The parts, as slices on the device."""
        ends = np.cumsum(self.lengths)
        starts = ends - self.lengths
        return Batch(
            *(lax.slice(packed, (int(a),), (int(b),)) for a, b in zip(starts, ends, strict=True))
        )

    def empty(self) -> npt.NDArray[np.int32]:
        """A packed batch without any work."""
        packed = np.zeros(self.packed_size, np.int32)
        parts = Batch(*self.views(packed))  # type: ignore[arg-type]  # arrays of the host
        parts.slot[:] = self.num_slots
        parts.row[:] = self.shape.rows
        parts.page_slot[:] = self.num_slots
        return packed

    def views(self, packed: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """The parts, as writable views on the host."""
        return np.split(packed, np.cumsum(self.lengths)[:-1])


def pack_batch(plan: StepPlan, layout: BatchLayout) -> npt.NDArray[np.int32]:
    """Pack a plan: entry `i` of the plan takes sequence row `i`.

    Args:
        plan: what the scheduler chose; it must fit the layout's shape.
        layout: of the shape chosen for this plan.

    Returns:
        i32[layout.packed_size].
    """
    packed = layout.empty()
    slot, start, length, flags, last, token, position, row, *deltas = layout.views(packed)
    page_slot, page_index, page = deltas
    filled = added = 0
    admitted = {id(seq) for seq in plan.admitted}
    for i, entry in enumerate(plan.entries):
        slot[i], start[i], length[i] = entry.slot, entry.start, entry.count
        flags[i] = DECODES * entry.is_decode | SAMPLES * entry.samples
        if entry.is_decode:
            last[i] = i
        else:
            end = filled + entry.count
            token[filled:end] = entry.seq.token_ids[entry.start : entry.start + entry.count]
            position[filled:end] = np.arange(entry.start, entry.start + entry.count)
            row[filled:end] = i
            last[i] = layout.shape.rows + end - 1
            filled = end
        if entry.new_pages and id(entry.seq) not in admitted:  # set_slot sent the whole table
            new = added + len(entry.new_pages)
            page_slot[added:new] = entry.slot
            page_index[added:new] = np.arange(new - added) + entry.first_new_page
            page[added:new] = entry.new_pages
            added = new
    return packed

"""From a step plan to one fixed-shape int32 array: the seam where nothing can recompile.

`pack_batch` is a pure NumPy function of the plan; `BatchLayout.unpack` is its inverse on the
device.  Tokens of decoding sequences are not in it: the device fed them back to itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.shapes import StepShape
from pallas_kernels.cpu.ask import WHOM
from scheduler import ScheduledTokens, StepPlan

DECODES = 1
"""Row flag: the sequence computes its one token in its sequence row."""
SAMPLES = 2
"""Row flag: the step samples the sequence's next token."""


class Batch(NamedTuple):
    """One dispatch's work on the device."""

    num_steps: jax.Array  # i32[1], at most the layout's max_steps
    whom: jax.Array  # i32[WHOM], whom to ask for the masks of constraints
    slot: jax.Array  # i32[rows], num_slots for an unused row
    start: jax.Array  # i32[rows], position of the first token computed
    length: jax.Array  # i32[rows], tokens computed, by a decode one a step; 0 for an unused row
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
    max_steps: int = 1
    """Most decode steps of one dispatch; 1 in shapes with chunk rows."""

    @property
    def num_deltas(self) -> int:
        """Most pages that one dispatch can add to block tables.

        A run of tokens touches at most one page more than it fills.
        """
        per_row = 1 + -(-self.max_steps // self.page_size)
        return per_row * self.shape.rows + self.shape.chunk // self.page_size

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each part, in the order of `Batch`."""
        rows, chunk, deltas = self.shape.rows, self.shape.chunk, self.num_deltas
        return (1, WHOM) + (rows,) * 5 + (chunk,) * 3 + (deltas,) * 3

    @property
    def num_row_numbers(self) -> int:
        """Length of the beginning of the packed array that is the same for any chunk: of
        `num_steps`, `whom`, `slot`, `start`, `length` and `flags`."""
        return 1 + WHOM + 4 * self.shape.rows

    @property
    def packed_size(self) -> int:
        """Length of the packed array."""
        return sum(self.lengths)

    def unpack(self, packed: jax.Array) -> Batch:
        """The parts, as slices on the device."""
        return Batch(*(lax.slice(packed, (a,), (b,)) for a, b in self._bounds))

    def empty(self) -> npt.NDArray[np.int32]:
        """A packed batch of one step without any work."""
        return self._empty.copy()

    def views(self, packed: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """The parts, as writable views on the host."""
        return [packed[a:b] for a, b in self._bounds]

    @cached_property
    def _bounds(self) -> tuple[tuple[int, int], ...]:
        ends = tuple(itertools.accumulate(self.lengths))
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    @cached_property
    def _empty(self) -> npt.NDArray[np.int32]:
        packed = np.zeros(self.packed_size, np.int32)
        parts = Batch(*self.views(packed))  # type: ignore[arg-type]  # arrays of the host
        parts.num_steps[:] = 1
        parts.slot[:] = self.num_slots
        parts.last[:] = np.arange(self.shape.rows)  # of a decode row
        parts.row[:] = self.shape.rows
        parts.page_slot[:] = self.num_slots
        return packed


def address(packed: npt.NDArray[np.int32], whom: tuple[int, int, int]) -> None:
    """Have a packed batch ask for the masks of its rows; see `pallas_kernels.cpu.ask`."""
    packed[1 : 1 + WHOM] = whom


def pack_batch(plan: StepPlan, layout: BatchLayout) -> npt.NDArray[np.int32]:
    """Pack a plan: entry `i` of the plan takes sequence row `i`.

    Args:
        plan: what the scheduler chose; it must fit the layout's shape.
        layout: of the shape chosen for this plan.

    Returns:
        i32[layout.packed_size].
    """
    assert plan.num_steps <= layout.max_steps, (plan.num_steps, layout)
    packed = layout.empty()
    views = layout.views(packed)
    entries, used = plan.entries, len(plan.entries)
    # One list per part: NumPy converts a list several times faster than it stores its numbers.
    steps, _, slot, start, length, flags = views[:6]
    steps[0] = plan.num_steps
    slot[:used] = [entry.slot for entry in entries]
    start[:used] = [entry.start for entry in entries]
    length[:used] = [entry.count for entry in entries]
    flags[:used] = [DECODES * entry.is_decode | SAMPLES * entry.samples for entry in entries]
    if layout.shape.chunk:
        _pack_chunk(entries, layout.shape.rows, views[6:10])
    admitted = {id(seq) for seq in plan.admitted}  # `set_slot` sent their whole tables
    changed = [e for e in entries if e.new_pages and id(e.seq) not in admitted]
    _pack_deltas(changed, views[10:])
    return packed


def _pack_chunk(
    entries: Iterable[ScheduledTokens], rows: int, views: Sequence[npt.NDArray[np.int32]]
) -> None:
    """Fill in `last`, `token`, `position` and `row` of the entries that prefill."""
    last, token, position, row = views
    filled = 0
    for i, entry in enumerate(entries):
        if not entry.is_decode:
            end = filled + entry.count
            token[filled:end] = entry.token_ids
            position[filled:end] = np.arange(entry.start, entry.end)
            row[filled:end] = i
            last[i] = rows + end - 1
            filled = end


def _pack_deltas(
    entries: Iterable[ScheduledTokens], views: Sequence[npt.NDArray[np.int32]]
) -> None:
    """Fill in `page_slot`, `page_index` and `page` of the entries with new pages."""
    page_slot, page_index, page = views
    added = 0
    for entry in entries:
        end = added + len(entry.new_pages)
        page_slot[added:end] = entry.slot
        page_index[added:end] = np.arange(entry.first_new_page, entry.first_new_page + end - added)
        page[added:end] = entry.new_pages
        added = end

"""The closed set of step shapes: every step of the engine's life has one of these.

A step has `rows` sequence rows, each a sequence that takes part, followed by `chunk` rows of
prompt tokens, ragged over several sequences.  A decoding sequence computes its one token in its
sequence row; a prefilling one computes its tokens in chunk rows and only samples in its sequence
row.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.config import EngineConfig

SMALLEST_ROWS = {"cpu": 8}
"""Fewest rows of a step: below 8, XLA's CPU backend leaves the matrix units (4x slower)."""


@dataclass(frozen=True, order=True)
class StepShape:
    """One compiled shape."""

    rows: int
    """Sequence rows."""
    chunk: int
    """Chunk rows; 0 in a pure decode step."""

    @property
    def tokens(self) -> int:
        """Rows that the model computes."""
        return self.rows + self.chunk

    def __str__(self) -> str:
        """Short name for tables and file names."""
        return f"decode{self.rows}" if not self.chunk else f"mixed{self.rows}x{self.chunk}"


@dataclass(frozen=True)
class ShapeSet:
    """All step shapes of an engine."""

    decode_rows: tuple[int, ...]
    """Rows of the pure decode steps, increasing."""
    chunks: tuple[int, ...]
    """Chunk rows of the mixed steps, increasing; mixed steps have the most sequence rows."""

    @property
    def max_rows(self) -> int:
        """Most sequence rows of a step."""
        return self.decode_rows[-1]

    @property
    def max_chunk(self) -> int:
        """Most chunk rows of a step."""
        return self.chunks[-1]

    def all(self) -> tuple[StepShape, ...]:
        """Every shape, decode first."""
        decode = tuple(StepShape(rows, 0) for rows in self.decode_rows)
        return decode + tuple(StepShape(self.max_rows, chunk) for chunk in self.chunks)

    def split(self) -> tuple[StepShape, ...]:
        """The shapes that also exist split in two, decode first: those with the most rows.

        Such steps run only while a sequence with a constraint samples, and rows of padding cost
        little beside the compilation of more executables.
        """
        return ShapeSet((self.max_rows,), self.chunks).all()

    def choose_split(self, num_seqs: int, num_chunk_tokens: int) -> StepShape:
        """The smallest shape of `split` that holds a step.

        Raises:
            ValueError: none does.
        """
        return ShapeSet((self.max_rows,), self.chunks).choose(num_seqs, num_chunk_tokens)

    def choose(self, num_seqs: int, num_chunk_tokens: int) -> StepShape:
        """The smallest shape that holds a step.

        Raises:
            ValueError: none does.
        """
        if num_chunk_tokens == 0:
            return StepShape(_at_least(self.decode_rows, num_seqs, "sequences"), 0)
        _at_least(self.decode_rows, num_seqs, "sequences")
        chunk = _at_least(self.chunks, num_chunk_tokens, "chunk tokens")
        return StepShape(self.max_rows, chunk)


def _at_least(sizes: tuple[int, ...], need: int, what: str) -> int:
    for size in sizes:
        if size >= need:
            return size
    raise ValueError(f"a step of {need} {what} has no shape; the largest holds {sizes[-1]}")


def shape_set(config: EngineConfig, platform: str, *, any_rows: bool = False) -> ShapeSet:
    """The shapes of a configuration on a platform.

    Decode rows double up to `max_num_seqs`; chunks are an eighth, a half and the whole of the
    token budget, unless the configuration names its own.  `deterministic` keeps the largest of
    each.

    Args:
        config: slots, token budget and buckets.
        platform: of the devices.
        any_rows: products are efficient for any number of rows, down to one.

    Raises:
        ValueError: configured buckets do not reach `max_num_seqs` or the token budget.
    """
    least = 1 if any_rows else SMALLEST_ROWS.get(platform, 1)
    decode = config.batch_buckets or _doubling(least, max(config.max_num_seqs, least))
    budget = config.max_num_batched_tokens
    chunks = config.prefill_buckets or _fractions(budget)
    if decode[-1] < config.max_num_seqs:
        raise ValueError(
            f"batch_buckets={decode} do not reach max_num_seqs={config.max_num_seqs}; add it"
        )
    if not config.enable_chunked_prefill and chunks[-1] < budget:
        raise ValueError(
            f"prefill_buckets={chunks} do not reach max_num_batched_tokens={budget}, which "
            "prefill without chunks needs; add it"
        )
    if config.deterministic:
        decode, chunks = decode[-1:], chunks[-1:]
    return ShapeSet(decode_rows=decode, chunks=chunks)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(2 * sizes[-1], last))
    return tuple(sizes)


def _fractions(budget: int) -> tuple[int, ...]:
    return tuple(sorted({max(budget // 8, min(16, budget)), max(budget // 2, 1), budget}))

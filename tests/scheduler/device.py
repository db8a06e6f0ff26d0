"""A device in miniature that knows what every cell of every page contains.

It runs plans in dispatch order, as a real one does, and keeps its own block tables, slots and
newest tokens, so that whatever a plan fails to tell it is missing here too.  Instead of keys and
values it writes a hash of all tokens up to the cell, which is what they depend on.  Every read is
checked: pages reused too early, too late or for another prefix, and lost writes, are all wrong
hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler import NULL_PAGE, FinishReason, ScheduledTokens, Sequence, StepPlan

VOCAB_SIZE = 5
GARBAGE = -1
"""What padding writes."""


@dataclass(eq=False)
class Request:
    """A sequence and all that the model would ever say to it."""

    seq: Sequence
    seed: int
    breaks_at: int | None = None
    """The token at this position gives logits that are not finite, if this sequence computes it."""
    stops_after: int | None = None
    """A stop string is complete with this many output tokens."""
    completes_after: int | None = None
    """Nothing may follow so many output tokens, which shows when the next is to be sampled."""
    ends_on_device: bool = True
    """The device knows its `stop_ids`; if not, the host alone finds them."""
    _chain: list[int] = field(default_factory=list)

    def token(self, position: int) -> int:
        """The token at `position`, whoever runs beside it."""
        if position < self.seq.num_prompt:
            return self.seq.token_ids[position]
        return (self.seed * 7 + position * position * 3 + position // 3) % VOCAB_SIZE

    def chain(self, end: int) -> list[int]:
        """What the cells of positions 0 to `end` must contain."""
        while len(self._chain) < end:
            before = self._chain[-1] if self._chain else hash(self.seq.cache_salt)
            self._chain.append(hash((before, self.token(len(self._chain)))))
        return self._chain[:end]

    def is_complete(self, position: int) -> bool:
        """Whether no token may be sampled for a position."""
        return (
            self.completes_after is not None
            and position - self.seq.num_prompt >= self.completes_after
        )

    def solo(self) -> tuple[list[int], FinishReason, int | None]:
        """Output, finish reason and stop token of this request on its own."""
        seq, output = self.seq, list[int]()
        while True:
            position = seq.num_prompt + len(output)
            if self.breaks_at is not None and self.breaks_at < position:
                return output, FinishReason.ERROR, None
            if seq.max_tokens == 0:
                return output, FinishReason.LENGTH, None
            if self.is_complete(position):
                return output, FinishReason.STOP, None
            output.append(self.token(position))
            if len(output) == self.stops_after:
                return output, FinishReason.STOP, None
            if output[-1] in seq.stop_ids and len(output) >= seq.min_tokens:
                return output, FinishReason.STOP, output[-1]
            if len(output) == seq.max_tokens:
                return output, FinishReason.LENGTH, None


@dataclass
class Slot:
    """What the device knows of the sequence in a slot."""

    request: Request
    block_table: list[int]
    version: int
    """Of the weights when it got the slot: what it reads is no older."""
    newest: tuple[int, int] | None = None
    """Position and id of the token sampled last."""
    ended: bool = False
    """By a token or by logits that are not finite: it decodes no more."""


class Span(NamedTuple):
    """Positions of an entry that one step computes."""

    index: int
    entry: ScheduledTokens
    start: int
    end: int


class Results(NamedTuple):
    """What came of a plan."""

    tokens: list[list[int]]
    """Of each entry."""
    failed: set[int]
    """Entries that gave no finite logits."""
    complete: set[int]
    """Entries after whose tokens nothing may follow."""


class FakeDevice:
    """Runs plans and asserts at each entry that it reads its own sequence's tokens only."""

    def __init__(self, page_size: int) -> None:
        self.requests: dict[str, Request] = {}
        self.version = 0
        self._page_size = page_size
        self._cells: dict[tuple[int, int], int | None] = {}
        self._versions: dict[tuple[int, int], int] = {}
        self._host_cells: dict[tuple[int, int], tuple[int | None, int]] = {}
        self._slots: dict[int, Slot] = {}
        self._sampled: set[tuple[str, int]] = set()

    def run(self, plan: StepPlan) -> Results:
        """Run a plan."""
        self._receive(plan)
        tokens: list[list[int]] = [[] for _ in plan.entries]
        failed: set[int] = set()
        complete: set[int] = set()
        for step in range(plan.num_steps):
            spans = list(self._spans(plan, step))
            for span in spans:
                self._check_reads(span.entry, span.start)
            self._write_padding()
            for span in spans:
                self._write(span)
            for span in spans:
                self._check_reads(span.entry, span.end)
            for span in spans:
                if self._is_broken(span):
                    self._slots[span.entry.slot].ended = True
                    failed.add(span.index)
                elif span.entry.samples and self._slots[span.entry.slot].request.is_complete(
                    span.end
                ):
                    self._slots[span.entry.slot].ended = True
                    complete.add(span.index)
                elif span.entry.samples:
                    tokens[span.index].append(self._sample(span))
        return Results(tokens, failed, complete)

    def _spans(self, plan: StepPlan, step: int) -> Iterator[Span]:
        """What one step of a plan computes."""
        for index, entry in enumerate(plan.entries):
            if not entry.is_decode:
                assert plan.num_steps == 1, "a step of several has a prefill chunk"
                yield Span(index, entry, entry.start, entry.end)
            elif step < entry.count and not self._slots[entry.slot].ended:
                yield Span(index, entry, entry.start + step, entry.start + step + 1)

    def _receive(self, plan: StepPlan) -> None:
        for copy in plan.swapped_out:
            for page, host_page in zip(copy.pages, copy.host_pages, strict=True):
                for offset in range(self._page_size):
                    self._host_cells[host_page, offset] = self._content(page, offset)
        for copy in plan.swapped_in:
            for page, host_page in zip(copy.pages, copy.host_pages, strict=True):
                for offset in range(self._page_size):
                    cell = page, offset
                    self._cells[cell], self._versions[cell] = self._host_cells[host_page, offset]
        for seq in plan.admitted:
            assert seq.slot is not None
            request = self.requests[seq.seq_id]
            self._slots[seq.slot] = Slot(request, list(seq.block_table), self.version)
        for entry in plan.entries:
            slot = self._slots[entry.slot]
            assert slot.request.seq is entry.seq, "the slot belongs to another sequence"
            slot.block_table[entry.first_new_page :] = entry.new_pages

    def _content(self, page: int, offset: int) -> tuple[int | None, int]:
        return self._cells.get((page, offset)), self._versions.get((page, offset), self.version)

    def _cell(self, entry: ScheduledTokens, position: int) -> tuple[int, int]:
        page = self._slots[entry.slot].block_table[position // self._page_size]
        assert page != NULL_PAGE
        return page, position % self._page_size

    def _is_broken(self, span: Span) -> bool:
        breaks_at = self._slots[span.entry.slot].request.breaks_at
        return breaks_at is not None and breaks_at < span.end

    def _check_reads(self, entry: ScheduledTokens, end: int) -> None:
        slot = self._slots[entry.slot]
        request = slot.request
        expected: list[int | None] = list(request.chain(end))
        if request.breaks_at is not None:
            expected[request.breaks_at :] = [None] * (end - request.breaks_at)
        cells = [self._cell(entry, position) for position in range(end)]
        found = [self._cells.get(cell) for cell in cells]
        assert found == expected, f"{entry.seq.seq_id} reads what is not its own before {end}"
        assert all(self._versions[cell] >= slot.version for cell in cells), "stale pages are read"

    def _write_padding(self) -> None:
        for offset in range(self._page_size):
            self._cells[NULL_PAGE, offset] = GARBAGE

    def _write(self, span: Span) -> None:
        entry = span.entry
        slot = self._slots[entry.slot]
        for position, token in enumerate(self._inputs(span), span.start):
            if position == 0:
                before: int | None = hash(entry.seq.cache_salt)
            else:
                before = self._cells[self._cell(entry, position - 1)]
            broken = before is None or position == slot.request.breaks_at
            cell = self._cell(entry, position)
            self._cells[cell] = None if broken else hash((before, token))
            self._versions[cell] = self.version

    def _inputs(self, span: Span) -> list[int]:
        """The tokens to compute: the device's own in decode, else those that the host sends."""
        entry = span.entry
        if entry.is_decode:
            newest = self._slots[entry.slot].newest
            assert newest is not None, "a decode entry in a slot that has sampled nothing"
            position, token = newest
            assert position == span.start
            return [token]
        assert len(entry.token_ids) == entry.count, "the host does not know what it sends"
        return entry.token_ids

    def _sample(self, span: Span) -> int:
        seq = span.entry.seq
        name = (seq.seq_id, span.end)
        assert name not in self._sampled, f"{name} is sampled twice: a token was thrown away"
        self._sampled.add(name)
        slot = self._slots[span.entry.slot]
        token = slot.request.token(span.end)
        slot.newest = (span.end, token)
        late_enough = span.end + 1 - seq.num_prompt >= seq.min_tokens
        slot.ended = slot.request.ends_on_device and token in seq.stop_ids and late_enough
        return token

"""Which tokens each constrained sequence may take next, as masks.

Knows sequences and their matchers.  Masks are filled by worker threads of llguidance's, without
holding the interpreter.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxserve.carry import pack_ids
from jaxserve.grammar import Grammars, why
from jaxserve.request import Failure
from jaxserve.sampling_params import SamplingParams
from pallas_kernels.cpu.ask import HostAnswers
from scheduler import ScheduledTokens, Sequence, StepPlan

if TYPE_CHECKING:
    import llguidance


MOST_THREADS = 32
"""That fill masks."""
NO_MASKS = "the constraint's masks could not be made"
BROKEN_CONSTRAINT = "the constraint cannot be followed any more"
MOST_NUMBERS = 2**30
"""Of questions, so that they fit 32 bits; far more than are open at once."""


class Ended(NamedTuple):
    """Sequences that can take no further token."""

    complete: Seq[Sequence]
    """Their text is complete: nothing may follow it."""
    broken: Seq[tuple[Sequence, Failure]]
    """Their constraint cannot be followed any more, and why."""

    def rows(self, plan: StepPlan) -> tuple[set[int], set[int]]:
        """Entries of a plan that are complete, and those that are broken."""
        if not self.complete and not self.broken:
            return set(), set()
        row = {entry.seq: index for index, entry in enumerate(plan.entries)}
        return {row[seq] for seq in self.complete}, {row[seq] for seq, _ in self.broken}


NOTHING = Ended((), ())


class Masks(NamedTuple):
    """Masks for a step."""

    words: npt.NDArray[np.int32]  # [slots, words], packed bits; all set where nothing is masked
    ended: Ended


@dataclass(eq=False, slots=True)
class _Constraint:
    """One sequence's place in its grammar."""

    matcher: llguidance.LLMatcher
    never: npt.NDArray[np.int32] | None
    """End tokens that the request does not want, as the bits of all others."""
    num_seen: int = 0
    """Output tokens of the sequence that the matcher has seen."""


class _Limited(NamedTuple):
    """A row of a plan that samples under a constraint."""

    row: int
    """Of the masks."""
    seq: Sequence
    constraint: _Constraint
    tokens: list[int] | None
    """That the matcher is to see first; None for the newest one, which only the device knows."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What a dispatch asks, once a step, and what was answered."""

    rows: list[_Limited]
    complete: list[Sequence] = field(default_factory=list)
    broken: list[tuple[Sequence, Failure]] = field(default_factory=list)


class Constraints:
    """The constrained sequences of an engine.

    Masks are given in one of two ways: `masks` before a step samples, or in answer to a step that
    asks, from `question` to `settle`.  Then matchers belong to the step's thread.

    Args:
        grammars: compiles constraints.
        num_slots: of the engine.
        num_rows: most sequence rows of a step.
        words: 32-bit words of a mask.
    """

    def __init__(self, grammars: Grammars, num_slots: int, num_rows: int, words: int) -> None:
        self.grammars = grammars
        self._num_slots = num_slots
        self._num_rows = num_rows
        self._words = words
        self._known: dict[Sequence, _Constraint] = {}
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count()

    def add(self, seq: Sequence, params: SamplingParams, grammar: llguidance.LLMatcher) -> None:
        """Constrain a sequence that has no output yet.

        Args:
            seq: the sequence.
            params: of its request.
            grammar: from `Grammars.compile`; a copy is made.
        """
        self._known[seq] = _Constraint(grammar.deep_copy(), self._never(params))

    def discard(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._known.pop(seq, None)

    def is_complete(self, seq: Sequence) -> bool:
        """Whether nothing may follow the output of a sequence that the scheduler has ended.

        No step that runs may ask for its mask: its matcher is the step's then.
        """
        constraint = self._known.get(seq)
        if constraint is None:
            return False
        fits = constraint.matcher.consume_tokens(_unseen(seq, constraint))
        return bool(fits and constraint.matcher.is_stopped())

    def check_idle(self) -> None:
        """Assert that nothing is left of sequences that have ended."""
        assert not self._known, f"{len(self._known)} constraints left while idle"
        assert not self._questions, f"{len(self._questions)} questions left while idle"

    def limit(self, plan: StepPlan) -> bool:
        """Whether a plan samples tokens of constrained sequences."""
        return bool(self._known) and any(e.samples and e.seq in self._known for e in plan.entries)

    def masks(self, plan: StepPlan) -> Masks:
        """The masks of a plan, by slot; all tokens of its sequences must be known."""
        words = np.full((self._num_slots, self._stride), -1, np.int32)
        question = _Question(
            [
                _Limited(entry.slot, entry.seq, constraint, _unseen(entry.seq, constraint))
                for _, entry, constraint in self._limited(plan)
            ]
        )
        self._next(question, question.rows, words)
        words = np.ascontiguousarray(words[:, : self._words])
        return Masks(words, Ended(question.complete, question.broken))

    def question(self, plan: StepPlan) -> tuple[int, tuple[int, int, int]]:
        """Prepare to be asked for the masks of a plan, by row.

        Returns:
            The number of the question, for `settle`, and whom the step must ask.
        """
        rows = [
            _Limited(
                row,
                entry.seq,
                constraint,
                None if entry.is_decode else _unseen(entry.seq, constraint),
            )
            for row, entry, constraint in self._limited(plan)
        ]
        number = next(self._numbers) % MOST_NUMBERS
        self._questions[number] = _Question(rows)
        return number, self._host.whom(number)

    def settle(self, number: int | None) -> Ended:
        """What came of a question, whose step is done."""
        if number is None:
            return NOTHING
        question = self._questions.pop(number)
        return Ended(question.complete, question.broken)

    def _limited(self, plan: StepPlan) -> list[tuple[int, ScheduledTokens, _Constraint]]:
        return [
            (row, entry, self._known[entry.seq])
            for row, entry in enumerate(plan.entries)
            if entry.samples and entry.seq in self._known
        ]

    def _answer(self, number: int) -> None:
        """Called by a step that asks, on its thread."""
        host, question = self._host, self._questions[number]
        asks, newest = host.asks.tolist(), host.token.tolist()
        rows = [
            row if row.tokens is not None else row._replace(tokens=[newest[row.row]])
            for row in question.rows
            if asks[row.row]
        ]
        try:
            stopped = self._next(question, rows, host.words)
        except Exception as error:
            settled = {*question.complete, *(seq for seq, _ in question.broken)}
            failed = [row.seq for row in rows if row.seq not in settled]
            question.broken.extend((seq, Failure(f"{NO_MASKS}: {error}", None)) for seq in failed)
            raise
        for row in stopped:
            host.stops[row] = 1

    def _next(
        self, question: _Question, rows: Seq[_Limited], words: npt.NDArray[np.int32]
    ) -> list[int]:
        """Show the matchers the rows' tokens and fill in what may follow, on all cores.

        Returns:
            The rows after which nothing can.
        """
        goes_on: list[_Limited] = []
        stopped: list[int] = []
        for limited in rows:
            row, seq, constraint, tokens = limited
            assert tokens is not None
            constraint.num_seen += len(tokens)
            matcher = constraint.matcher
            if tokens and not matcher.consume_tokens(tokens):
                question.broken.append((seq, _cannot_follow(matcher)))
                stopped.append(row)
            elif matcher.is_stopped():
                question.complete.append(seq)
                stopped.append(row)
            else:
                goes_on.append(limited)
        self._fill(words, [(limited.constraint.matcher, limited.row) for limited in goes_on])
        for row, seq, constraint, _ in goes_on:
            if constraint.matcher.is_error():  # it has become too complex
                question.broken.append((seq, _cannot_follow(constraint.matcher)))
                stopped.append(row)
            if constraint.never is not None:
                words[row, : self._words] &= constraint.never
        return stopped

    def _fill(
        self, words: npt.NDArray[np.int32], matchers: list[tuple[llguidance.LLMatcher, int]]
    ) -> None:
        if matchers:  # llguidance refuses an empty list
            from llguidance.numpy import fill_next_token_bitmask_par

            fill_next_token_bitmask_par(self._executor, matchers, words)

    @property
    def _stride(self) -> int:
        """Words of a mask as llguidance fills it, with ids that the model may not have."""
        return -(-self.grammars.num_ids // 32)

    @cached_property
    def _host(self) -> HostAnswers:
        return HostAnswers(self._num_rows, self._stride, self._answer)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        import llguidance

        return llguidance.LLExecutor(num_threads=min(os.cpu_count() or 1, MOST_THREADS))

    def _never(self, params: SamplingParams) -> npt.NDArray[np.int32] | None:
        if self.grammars.has_end and not params.ignore_eos:
            return None
        end_ids = set(self.grammars.end_ids)
        return pack_ids([i for i in range(self._words * 32) if i not in end_ids], self._words)


def _unseen(seq: Sequence, constraint: _Constraint) -> list[int]:
    """Output tokens that the host knows and the matcher has not seen."""
    return seq.token_ids[seq.num_prompt + constraint.num_seen :]


def _cannot_follow(matcher: llguidance.LLMatcher) -> Failure:
    """The request is to blame: its constraint is too complex, as it has turned out."""
    return Failure(f"{BROKEN_CONSTRAINT}: {why(matcher.get_error())}", "structured_outputs")

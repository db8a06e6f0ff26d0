"""Which tokens each constrained sequence may take next, as the masks that a step is given.

Knows sequences and their matchers.  The masks are filled on a thread of their own, while the
device computes the first half of the step that will need them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxserve.carry import pack_ids
from jaxserve.grammar import Grammars
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured import StructuredOutputsParams
from scheduler import Sequence, StepPlan

if TYPE_CHECKING:
    import llguidance


class Masks(NamedTuple):
    """Masks for the rows of a step."""

    words: npt.NDArray[np.int32]  # [rows, words], packed bits; all set where nothing is masked
    complete: list[Sequence]
    """Sequences whose text is complete: nothing may follow it."""
    broken: list[tuple[Sequence, str]]
    """Sequences whose constraint cannot be followed any more, and why."""


@dataclass(eq=False, slots=True)
class _Constraint:
    """One sequence's place in its grammar."""

    matcher: llguidance.LLMatcher
    allowed: npt.NDArray[np.int32] | None
    """What the request allows besides, packed."""
    pending: list[int] = field(default_factory=list)
    """Tokens of the sequence that the matcher has not seen yet."""


class Constraints:
    """The constrained sequences of an engine.

    Args:
        grammars: compiles constraints.
        words: 32-bit words of a mask.
    """

    def __init__(self, grammars: Grammars, words: int) -> None:
        self.grammars = grammars
        self._words = words
        self._known: dict[Sequence, _Constraint] = {}
        self._thread = ThreadPoolExecutor(1, "masks")

    def add(self, seq: Sequence, params: SamplingParams) -> None:
        """Constrain a sequence that has no output yet, if its request asks for that."""
        if params.structured_outputs is None:
            return
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        matcher = self.grammars.matcher(params.structured_outputs)
        self._known[seq] = _Constraint(matcher, self._allowed(params))

    def discard(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._known.pop(seq, None)

    def limit(self, plan: StepPlan) -> bool:
        """Whether a plan samples tokens of constrained sequences."""
        return bool(self._known) and any(e.samples and e.seq in self._known for e in plan.entries)

    def rows(self, plan: StepPlan) -> list[int]:
        """The entries of a plan whose tokens are limited."""
        return [i for i, e in enumerate(plan.entries) if e.samples and e.seq in self._known]

    def record(self, seq: Sequence, tokens: Seq[int]) -> None:
        """A sequence has got tokens."""
        constraint = self._known.get(seq)
        if constraint is not None:
            constraint.pending += tokens

    def fill(self, plan: StepPlan, num_rows: int) -> Future[Masks]:
        """Start to fill the masks of a plan, whose sequences' tokens are all recorded.

        Nothing else may be called before the result is there.
        """
        rows = [(i, plan.entries[i].seq) for i in self.rows(plan)]
        # What ends meanwhile is forgotten here, so the thread is given the constraints themselves.
        limited = [(i, seq, self._known[seq]) for i, seq in rows]
        return self._thread.submit(self._fill, limited, num_rows)

    def _fill(self, rows: list[tuple[int, Sequence, _Constraint]], num_rows: int) -> Masks:
        words = np.full((num_rows, -(-self.grammars.num_ids // 32)), -1, np.int32)
        masks, goes_on = Masks(words, [], []), []
        for row, seq, constraint in rows:
            matcher = self._advanced(constraint)
            if matcher.is_error():
                masks.broken.append((seq, matcher.get_error()))
            elif matcher.is_stopped():
                masks.complete.append(seq)
            else:
                goes_on.append((matcher, row))
        if goes_on:  # llguidance refuses an empty list
            from llguidance.numpy import fill_next_token_bitmask_par

            fill_next_token_bitmask_par(self._executor, goes_on, words)
        words = np.ascontiguousarray(words[:, : self._words])
        for row, seq, constraint in rows:
            if constraint.matcher.is_error() and seq not in dict(masks.broken):
                masks.broken.append((seq, constraint.matcher.get_error()))  # too complex
            if constraint.allowed is not None:
                words[row] &= constraint.allowed
        return masks._replace(words=words)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        import llguidance

        return llguidance.LLExecutor()

    def _advanced(self, constraint: _Constraint) -> llguidance.LLMatcher:
        """The matcher, after the tokens that it has not seen yet."""
        if constraint.pending:
            constraint.matcher.consume_tokens(constraint.pending)
            constraint.pending.clear()
        return constraint.matcher

    def _allowed(self, params: SamplingParams) -> npt.NDArray[np.int32] | None:
        """What a request allows beside its constraint, packed; None for everything."""
        ids, goes_on = params.allowed_token_ids, params.ignore_eos or not self.grammars.has_end
        if ids is None and not goes_on:
            return None
        end_ids = self.grammars.end_ids if goes_on else ()
        chosen = range(self._words * 32) if ids is None else ids
        return pack_ids([i for i in chosen if i not in end_ids], self._words)

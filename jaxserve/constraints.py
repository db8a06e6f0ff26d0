"""Which tokens each constrained sequence may take next, as the masks that a step is given.

Knows sequences and their matchers.  Masks are filled by worker threads of llguidance's, without
holding the interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxserve.carry import pack_ids
from jaxserve.grammar import Grammars, first_line
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured import StructuredOutputsParams
from scheduler import Sequence, StepPlan

if TYPE_CHECKING:
    import llguidance


MOST_THREADS = 32
"""That fill masks."""


class Masks(NamedTuple):
    """Masks for a step."""

    words: npt.NDArray[np.int32]  # [slots, words], packed bits; all set where nothing is masked
    complete: list[Sequence]
    """Sequences whose text is complete: nothing may follow it."""
    broken: list[tuple[Sequence, str]]
    """Sequences whose constraint cannot be followed any more, and why."""


@dataclass(eq=False, slots=True)
class _Constraint:
    """One sequence's place in its grammar."""

    matcher: llguidance.LLMatcher
    never: npt.NDArray[np.int32] | None
    """End tokens that the request does not want, as the bits of all others."""
    pending: list[int] = field(default_factory=list)
    """Tokens of the sequence that the matcher has not seen yet."""


class Constraints:
    """The constrained sequences of an engine.

    Args:
        grammars: compiles constraints.
        num_slots: of the engine.
        words: 32-bit words of a mask.
    """

    def __init__(self, grammars: Grammars, num_slots: int, words: int) -> None:
        self.grammars = grammars
        self._num_slots = num_slots
        self._words = words
        self._known: dict[Sequence, _Constraint] = {}

    def add(self, seq: Sequence, params: SamplingParams) -> None:
        """Constrain a sequence that has no output yet, if its request asks for that."""
        if params.structured_outputs is None:
            return
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        matcher = self.grammars.matcher(params.structured_outputs)
        self._known[seq] = _Constraint(matcher, self._never(params))

    def discard(self, seq: Sequence) -> None:
        """Forget a sequence."""
        self._known.pop(seq, None)

    def limit(self, plan: StepPlan) -> bool:
        """Whether a plan samples tokens of constrained sequences."""
        return bool(self._known) and any(e.samples and e.seq in self._known for e in plan.entries)

    def record(self, seq: Sequence, tokens: Seq[int]) -> None:
        """A sequence has got tokens."""
        constraint = self._known.get(seq)
        if constraint is not None:
            constraint.pending += tokens

    def masks(self, plan: StepPlan) -> Masks:
        """The masks of a plan, whose sequences' tokens are all recorded; filled on all cores."""
        words = np.full((self._num_slots, -(-self.grammars.num_ids // 32)), -1, np.int32)
        masks, goes_on = Masks(words, [], []), []
        limited = [
            (entry.slot, entry.seq, self._known[entry.seq])
            for entry in plan.entries
            if entry.samples and entry.seq in self._known
        ]
        for slot, seq, constraint in limited:
            matcher, pending = constraint.matcher, constraint.pending
            if pending and not matcher.consume_tokens(pending):
                masks.broken.append((seq, first_line(matcher.get_error())))
            elif matcher.is_stopped():
                masks.complete.append(seq)
            else:
                goes_on.append((matcher, slot, seq))
            pending.clear()
        self._fill(words, [(matcher, slot) for matcher, slot, _ in goes_on])
        for matcher, _, seq in goes_on:
            if matcher.is_error():  # it has become too complex
                masks.broken.append((seq, first_line(matcher.get_error())))
        words = np.ascontiguousarray(words[:, : self._words])
        for slot, _, constraint in limited:
            if constraint.never is not None:
                words[slot] &= constraint.never
        return masks._replace(words=words)

    def _fill(
        self, words: npt.NDArray[np.int32], matchers: list[tuple[llguidance.LLMatcher, int]]
    ) -> None:
        if matchers:  # llguidance refuses an empty list
            from llguidance.numpy import fill_next_token_bitmask_par

            fill_next_token_bitmask_par(self._executor, matchers, words)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        import llguidance

        return llguidance.LLExecutor(num_threads=min(os.cpu_count() or 1, MOST_THREADS))

    def _never(self, params: SamplingParams) -> npt.NDArray[np.int32] | None:
        if self.grammars.has_end and not params.ignore_eos:
            return None
        end_ids = set(self.grammars.end_ids)
        return pack_ids([i for i in range(self._words * 32) if i not in end_ids], self._words)

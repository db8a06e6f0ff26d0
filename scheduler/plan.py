"""What one step computes: the scheduler's answer, and all that a runner needs to know of it.

Knows nothing of how the tokens were chosen, nor of the arrays that they will be packed into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from scheduler.sequence import Sequence
from scheduler.swap_space import PageCopy


@dataclass(eq=False, slots=True)
class ScheduledTokens:
    """Tokens `start` to `start + count` of a sequence, to compute in its slot.

    A prefill chunk computes them all in one step, a decode entry one in each of `count` steps.

    Read only by convention.  A step makes one of these per running sequence, and to make frozen
    ones would take five times as long: more than all else that the scheduler does.
    """

    seq: Sequence
    slot: int
    start: int
    count: int
    samples: bool
    """Its last token is the sequence's last, so that the device samples the next one."""
    is_decode: bool
    """Its first token is on the device already, and each step samples the token that the next
    computes.  The host sends the tokens of all other entries."""
    first_new_page: int
    """Place in the block table of the first of `new_pages`."""
    new_pages: tuple[int, ...]
    """Pages allocated for these tokens."""

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.count

    @property
    def num_samples(self) -> int:
        """Tokens that it samples, unless one of them ends the sequence before."""
        return self.count if self.is_decode else int(self.samples)

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute.  Of a decode entry the host may not know them yet."""
        return self.seq.token_ids[self.start : self.start + self.count]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the device is given to do at once; false if there is nothing to compute.

    Pages may have to be copied all the same.

    Plans must reach the device in the order they were made.  Pages and slots change hands
    between plans, and it is this order that makes it safe: whoever wrote a page in an earlier
    step is done with it when a later step gives it to another.
    """

    entries: tuple[ScheduledTokens, ...]
    """At most one per sequence."""
    admitted: tuple[Sequence, ...]
    """Sequences new in their slots, for the first time or after preemption.  Their slot's state,
    whole block tables included, must be sent before this step."""
    preempted: tuple[Sequence, ...]
    """Sequences that lost their slots and pages to this step."""
    num_steps: int = 1
    """Iterations of the device, at most; more than one only if all entries decode."""
    swapped_out: tuple[PageCopy, ...] = ()
    """Pages to copy to the host before anything else: preempted sequences had them."""
    swapped_in: tuple[PageCopy, ...] = ()
    """Pages to copy back before this step, for sequences in `admitted`."""

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute."""
        return not self.entries

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decode rows, of all steps."""
        return sum(entry.count for entry in self.entries if entry.is_decode)

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens of the prefill chunks."""
        return sum(entry.count for entry in self.entries if not entry.is_decode)


class Update(NamedTuple):
    """What the results of a plan changed."""

    accepted: tuple[tuple[int, int], ...]
    """Which of the plan's entries had sampled tokens appended to their sequence, and how many."""
    finished: tuple[Sequence, ...]
    """Sequences that the plan ended."""

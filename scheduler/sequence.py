"""One sequence: its tokens, how far they are computed, and the slot and pages that it holds.

Knows nothing of other sequences, of text, or of the policies that move it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

Rank = tuple[float, ...]
"""A place in an order, the smallest first."""


class Status(Enum):
    """Where a sequence is; it waits, runs, may be preempted and run again, and finishes."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False, slots=True)
class Sequence:
    """Prompt and output tokens of one request's sample, and what the KV cache holds of them.

    There is no prefill phase and no decode phase.  A sequence has `num_tokens` and
    `num_computed`, and the scheduler gives it tokens until the two meet: a prompt, a chunk of
    one, the rest after a prefix hit, the whole again after preemption, and the single last
    token of a decode step are the same thing.

    `num_computed` and `num_in_flight` move when a step is scheduled, `token_ids` when its
    result is back.  In between, the newest token exists on the device only.
    """

    seq_id: str
    token_ids: list[int]
    """The prompt, then the output tokens that the host knows."""
    max_tokens: int
    """Most output tokens; 0 computes the prompt and samples nothing."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, the end-of-sequence tokens among them unless ignored."""
    min_tokens: int = 0
    """`stop_ids` do not end it with fewer output tokens than this."""
    priority: int = 0
    """Lower goes first, under the policy "priority"."""
    key: str = ""
    """Whose it is: a user or tenant, for the fair share."""
    cache_salt: bytes = b""
    """Whatever else changes its keys and values, such as an adapter's id."""
    reads_prefix_cache: bool = True
    """False to compute every token of the prompt, as prompt log-probabilities need."""
    text_may_end: bool = False
    """True if its text may end it before its length, at a stop string or by a constraint."""
    single_step: bool = False
    """True if the host must know each token before the next is sampled: no plan of several steps
    while it runs."""

    num_prompt: int = field(init=False)
    """Tokens of the prompt."""
    max_computed: int = field(default=0, init=False)
    """Tokens it will ever need computed: all but the last output token, which nothing follows."""
    rank: Rank = field(default=(), init=False)
    """Its place among all sequences, the smallest the most senior.  No two are equal."""
    status: Status = field(default=Status.WAITING, init=False)
    slot: int | None = field(default=None, init=False)
    """Its row of the decode batch while it runs."""
    block_table: list[int] = field(default_factory=list, init=False)
    """Its pages in order of position."""
    page_keys: list[bytes] = field(default_factory=list, init=False)
    """Prefix-cache keys of its first full pages, as many as were ever asked for."""
    keeps_pages: bool = field(default=False, init=False)
    """Whether the pages it fills go to the prefix cache."""
    num_computed: int = field(default=0, init=False)
    """Tokens whose keys and values are cached, or being computed by a step in flight."""
    num_in_flight: int = field(default=0, init=False)
    """Tokens sampled by steps in flight, which the host does not know yet."""
    prefill_end: int = field(init=False)
    """`len(token_ids)` when it got its slot.  Every later token was sampled in that slot, so the
    device has it."""
    num_cached: int = field(default=0, init=False)
    """Prompt tokens found in the prefix cache when it was first admitted."""
    num_preemptions: int = field(default=0, init=False)
    """Times it lost its slot and pages."""
    is_stale: bool = field(default=False, init=False)
    """The weights have changed since it got its slot, so that its pages are a mixture."""
    host_pages: list[int] = field(default_factory=list, init=False)
    """Pages of the swap space with what its block table had, while it waits after preemption."""
    num_swapped: int = field(default=0, init=False)
    """Tokens whose keys and values they hold."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_token: int | None = field(default=None, init=False)
    """The token of `stop_ids` that ended it."""

    def __post_init__(self) -> None:
        self.num_prompt = self.prefill_end = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, on the host or only on the device."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_pending(self) -> int:
        """Tokens that exist and are not computed."""
        return self.num_tokens - self.num_computed

    @property
    def num_prefill(self) -> int:
        """Tokens to compute before it decodes: the prompt's, or all it had when preempted."""
        return max(self.prefill_end - self.num_computed, 0)

    @property
    def in_decode(self) -> bool:
        """True if the token to compute next was sampled in its present slot.

        False without a slot, where nothing is computed, and once all that it needs is.
        """
        return self.prefill_end <= self.num_computed < self.max_computed

    @property
    def num_left(self) -> int:
        """Tokens that it may still need computed."""
        return self.max_computed - self.num_computed

    @property
    def num_output(self) -> int:
        """Output tokens that the host knows."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """The output tokens that the host knows."""
        return self.token_ids[self.num_prompt :]

"""What the engine gives back: plain data, no engine types."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log-probability of one token at one position."""

    logprob: float
    rank: int
    """1 for the most likely token of the position."""
    decoded_token: str


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds, and counts.  `None` until it is known."""

    arrival_time: float
    """`time.monotonic()` at submit."""
    queue_time: float | None = None
    """From submit to the first admission into a slot."""
    ttft: float | None = None
    """From submit to the first output token of any sample."""
    itl: list[float] = field(default_factory=list)
    """Gaps between successive output tokens of sample 0."""
    e2e: float | None = None
    """From submit to the last token."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    num_preemptions: int = 0

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first."""
        return sum(self.itl) / len(self.itl) if self.itl else None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    """stop | length | abort | error, or None while it runs."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; None for the end-of-sequence token."""


@dataclass(slots=True)
class RequestOutput:
    """A request and all its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    """Why a sample ended with reason "error"."""
    blamed: str | None = None
    """The parameter of the request that has caused the error, if one has."""


@dataclass(slots=True)
class ScoreOutput:
    """Log-likelihood of a text under the model."""

    text: str | None
    token_ids: list[int]
    token_logprobs: list[float | None]
    """log p(token i | tokens before i); the first entry is None."""

    @property
    def log_likelihood(self) -> float:
        """Sum of the token log-probabilities, in nats."""
        return math.fsum(x for x in self.token_logprobs if x is not None)

    @property
    def mean_nll(self) -> float:
        """Mean negative log-likelihood per scored token, in nats; NaN with none scored."""
        scored = len(self.token_logprobs) - 1
        return -self.log_likelihood / scored if scored > 0 else math.nan

    @property
    def perplexity(self) -> float:
        """exp(mean_nll)."""
        return math.exp(self.mean_nll)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one sample of one request."""

    request_id: str
    index: int
    text: str
    """New text, possibly empty: bytes of an unfinished character and text that may turn out to
    begin a stop string are held back."""
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    """See `CompletionOutput`; set with the finish reason."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """One entry for each of `token_ids`, if the request asks for them."""

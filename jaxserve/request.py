"""A request and its samples on the host: what they ask for and what they have received.

Turns sampled tokens into text, log-probabilities and times.  Knows neither the device nor the
scheduler's decisions; a sample sees its sequence only to read its counts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.detokenizer import Detokenizer
from jaxserve.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput
from jaxserve.report import StepOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.stop_strings import StopStrings
from jaxserve.tokenizer import Tokenizer
from scheduler import FinishReason, Sequence


@dataclass(eq=False, slots=True)
class Sample:
    """One of a request's `n` samples."""

    request: Request
    index: int
    seq: Sequence
    detokenizer: Detokenizer | None
    stops: StopStrings
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_token_time: float | None = None
    num_tokens: int = 0
    """Output tokens whose text was made; a dispatch of several steps gives the sequence more at
    once."""
    is_late: bool = False
    """Its text may be made long after its tokens: nobody reads it yet or looks for stops in it."""

    @property
    def scores_prompt(self) -> bool:
        """It is the one of its request whose prompt log-probabilities are computed."""
        return self.index == 0 and self.request.params.prompt_logprobs is not None

    def push(self, token: int, ends: bool) -> str:
        """Take the next token; return the text that is now certain.

        Args:
            token: the sampled token.
            ends: it is an end token, whose text is shown only on request.
        """
        params = self.request.params
        self.num_tokens += 1
        if self.detokenizer is None or (ends and not params.include_stop_str_in_output):
            return ""
        text = self.detokenizer.push(token)
        if self.num_tokens < params.min_tokens:
            return text  # stop strings are not looked for before min_tokens
        return self.stops.push(text)

    def catch_up(self) -> str:
        """Make the text of tokens that have come without."""
        tokens = self.seq.output_ids[self.num_tokens :]
        last = len(tokens) - 1
        ended = self.seq.stop_token is not None
        return "".join(
            self.push(token, ends=ended and index == last) for index, token in enumerate(tokens)
        )

    def flush(self) -> str:
        """Text still held back, once no more tokens come."""
        if self.stops.matched is not None or self.detokenizer is None:
            return ""
        text = self.stops.push(self.detokenizer.flush())
        return text if self.stops.matched is not None else text + self.stops.flush()

    def output(self) -> CompletionOutput:
        """What the sample has so far."""
        if self.is_late:
            self.text.append(self.catch_up())
        wants = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="".join(self.text),
            token_ids=list(self.seq.output_ids),
            cumulative_logprob=self.cumulative_logprob if wants else None,
            logprobs=list(self.logprobs) if wants else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Failure(NamedTuple):
    """Why a sample ended with reason "error"."""

    message: str
    blamed: str | None = None
    """The parameter of the request that has caused it; None if the request is not to blame."""


@dataclass(eq=False, slots=True)
class Request:
    """What a user submitted, and its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    metrics: RequestMetrics
    whole: bool = False
    """Nobody looks at it before its end."""
    samples: list[Sample] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    failure: Failure | None = None

    @property
    def finished(self) -> bool:
        """All samples have ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    def output(self) -> RequestOutput:
        """What the request has so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[sample.output() for sample in self.samples],
            finished=self.finished,
            metrics=self.metrics,
            error=None if self.failure is None else self.failure.message,
            blamed=None if self.failure is None else self.failure.blamed,
        )

    def stamp_tokens(
        self, sample: Sample, count: int, now: float, ttfts: list[float], gaps: list[float]
    ) -> None:
        """Record the time of a sample's next tokens, which one dispatch gave.

        Args:
            sample: one of the request's.
            count: of the tokens, at least one.
            now: when they came.
            ttfts: TTFT is added if they are the request's first.
            gaps: the gap before each of them is added, but of the sample's first.
        """
        if self.metrics.ttft is None:
            self.metrics.ttft = now - self.metrics.arrival_time
            ttfts.append(self.metrics.ttft)
        since = sample.last_token_time
        new = [0.0] * (count - 1) if since is None else [now - since, *[0.0] * (count - 1)]
        gaps += new
        if sample.index == 0:
            self.metrics.itl += new
        sample.last_token_time = now

    def stamp_end(self, now: float) -> None:
        """Record the end of the last sample."""
        self.metrics.e2e = now - self.metrics.arrival_time
        self.metrics.num_preemptions = sum(s.seq.num_preemptions for s in self.samples)


def finish_sample(sample: Sample, reason: FinishReason) -> str:
    """End a sample; return its last text.  A stop string outranks any other reason."""
    text = sample.catch_up() if sample.is_late else ""
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        text += sample.flush()
    if sample.stops.matched is not None:
        sample.finish_reason, sample.stop_reason = FinishReason.STOP.value, sample.stops.matched
    else:
        sample.finish_reason = reason.value
    return text


def delta(sample: Sample, text: str, token_ids: tuple[int, ...]) -> Delta:
    """Describe a change: new text, the newest `token_ids`, and how the sample ended if it did."""
    wants = sample.request.params.logprobs is not None
    newest = sample.logprobs[len(sample.logprobs) - len(token_ids) :]
    return Delta(
        request_id=sample.request.request_id,
        index=sample.index,
        text=text,
        token_ids=token_ids,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        logprobs=tuple(newest) if wants else None,
    )


def logprob_entry(
    report: StepOutput, row: int | tuple[int, int], num_top: int, tokenizer: Tokenizer
) -> dict[int, Logprob]:
    """A row of a report: its token's log-probability first, then the `num_top` best.

    Args:
        report: of prompt log-probabilities, or of a dispatch.
        row: its index; in the report of a dispatch, step and row.
        num_top: entries beside the token's own.
        tokenizer: names the tokens.
    """
    token = int(report.token[row])
    entry = {
        token: Logprob(
            float(report.logprob[row]), int(report.rank[row]), tokenizer.token_text(token)
        )
    }
    ids: Seq[int] = report.top_ids[row][:num_top].tolist()
    values: Seq[float] = report.top_logprobs[row][:num_top].tolist()
    for rank, (top, value) in enumerate(zip(ids, values, strict=True), 1):
        entry.setdefault(top, Logprob(value, rank, tokenizer.token_text(top)))
    return entry

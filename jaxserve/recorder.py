"""What a step's results mean for the requests: text, log-probabilities, times, and ends.

Knows samples and the scheduler's answer.  Does not know how or when steps are run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from jaxserve.constraints import Constraints, Ended
from jaxserve.dispatch import chunk_rows
from jaxserve.flight import Landed
from jaxserve.observer import Observer
from jaxserve.outputs import Delta
from jaxserve.report import StepOutput
from jaxserve.request import Failure, Request, Sample, delta, finish_sample, logprob_entry
from jaxserve.stats import StepMeter
from jaxserve.tokenizer import Tokenizer
from scheduler import FinishReason, ScheduledTokens, Scheduler, Sequence, Update
from scheduler.summary import Bounds

NOT_FINITE = "the model's logits were not finite (NaN or infinity); this request was ended"
LATE_TOKENS = 64
"""After how many tokens text is made that nobody reads yet: often enough that the host is not kept
long by the end of an answer."""
_GOOD = (FinishReason.STOP, FinishReason.LENGTH)
"""Reasons of an end that a latency bound can be met with."""


class Recorder:
    """Keeps the samples of the sequences that have not ended.

    Args:
        scheduler: told of ends that only the text or the logits show.
        tokenizer: for texts.
        constraints: of the sequences that have one.
        meter: counts output tokens and requests within bounds.
        end_ids: the model's end tokens, which are no reason to be named.
        targets: bounds that a request must meet to be counted as good.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        constraints: Constraints,
        meter: StepMeter,
        end_ids: frozenset[int],
        targets: Bounds | None,
    ) -> None:
        self.samples: dict[Sequence, Sample] = {}
        self.observer = Observer()
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._constraints = constraints
        self._meter = meter
        self._end_ids = end_ids
        self._targets = targets

    def record_prompts(self, landed: Landed) -> list[Delta]:
        """Store a step's prompt log-probabilities; end the requests whose are not finite."""
        deltas: list[Delta] = []
        if landed.prompts is None:
            return deltas
        for first, entry in chunk_rows(landed.flight.plan):
            sample = self.samples.get(entry.seq)
            if sample is None or not sample.scores_prompt:
                continue
            request = sample.request
            if not self._record_prompt(request, landed.prompts, first, entry):
                left = [s for s in request.samples if s.finish_reason is None]
                deltas += [self.finish(sample, FinishReason.ERROR) for sample in left]
        return deltas

    def record_tokens(self, landed: Landed, tokens: Seq[Seq[int]], update: Update) -> list[Delta]:
        """Give the samples what the scheduler has accepted, and end those it has ended."""
        now = time.monotonic()
        failures = dict(landed.ended.broken)
        deltas: list[Delta] = []
        ttfts: list[float] = []
        gaps: list[float] = []
        for row, count in update.accepted:
            sample = self.samples[landed.flight.plan.entries[row].seq]
            text, taken = self._take_tokens(sample, landed.report, row, tokens[row][:count])
            sample.request.stamp_tokens(sample, len(taken), now, ttfts, gaps)
            if text:
                sample.text.append(text)
            if sample.seq.finish_reason is not None:
                text += self._close(sample, self._reason(sample.seq), failures.get(sample.seq))
            if sample.finish_reason is not None or not sample.request.whole:
                deltas.append(delta(sample, text, tuple(taken)))
        self.observer.on_tokens(ttfts, gaps)
        for seq in update.finished:
            left = self.samples.get(seq)
            if left is not None:  # not ended with its last token above
                text = self._close(left, self._reason(seq), failures.get(seq))
                deltas.append(delta(left, text, ()))
        return deltas

    def end_constrained(self, ended: Ended) -> list[Delta]:
        """End the sequences whose constraint says that nothing can follow."""
        deltas: list[Delta] = []
        for seq in ended.complete:
            if seq in self.samples:
                deltas.append(self.finish(self.samples[seq], FinishReason.STOP))
        for seq, failure in ended.broken:
            if seq in self.samples:
                deltas.append(self.finish(self.samples[seq], FinishReason.ERROR, failure))
        return deltas

    def finish(self, sample: Sample, reason: FinishReason, failure: Failure | None = None) -> Delta:
        """End a sample now; with reason "error", because of a failure."""
        self._scheduler.finish(sample.seq, reason)
        return delta(sample, self._close(sample, reason, failure), ())

    def _take_tokens(
        self, sample: Sample, report: StepOutput, row: int, tokens: Seq[int]
    ) -> tuple[str, Seq[int]]:
        """Give a sample the tokens of a dispatch, up to one that completes a stop string.

        Returns:
            The text that is now certain, and the tokens that were taken.
        """
        text, count = self._take_text(sample, tokens)
        num_top = sample.request.params.logprobs
        if num_top is not None:
            for step, token in enumerate(tokens[:count]):
                entry = logprob_entry(report, (step, row), num_top, self._tokenizer)
                sample.logprobs.append(entry)
                sample.cumulative_logprob += entry[token].logprob
        self._meter.output_tokens += count
        return text, tokens[:count]

    def _take_text(self, sample: Sample, tokens: Seq[int]) -> tuple[str, int]:
        """The text of tokens, and how many of them there are before it ends."""
        seq, text = sample.seq, ""
        if sample.is_late:
            if seq.num_output - sample.num_tokens >= LATE_TOKENS:
                text = sample.catch_up()
            return text, len(tokens)
        for count, token in enumerate(tokens, start=1):
            is_last = count == len(tokens)
            text += sample.push(token, ends=is_last and seq.stop_token is not None)
            if sample.stops.matched is not None:
                self._scheduler.cut(seq, len(tokens) - count)
                return text, count
        return text, len(tokens)

    def _reason(self, seq: Sequence) -> FinishReason:
        """How a sequence has ended; a text that its last token has made complete was not cut."""
        assert seq.finish_reason is not None
        if seq.finish_reason is FinishReason.LENGTH and self._constraints.is_complete(seq):
            return FinishReason.STOP
        return seq.finish_reason

    def _close(self, sample: Sample, reason: FinishReason, failure: Failure | None) -> str:
        """Record the end of a sample; its last text."""
        text, request = finish_sample(sample, reason), sample.request
        sample.text.append(text)
        if sample.finish_reason == FinishReason.ERROR.value and request.failure is None:
            request.failure = failure or Failure(NOT_FINITE)
        if sample.finish_reason == FinishReason.STOP.value and sample.stop_reason is None:
            token = sample.seq.stop_token
            sample.stop_reason = None if token in self._end_ids else token
        del self.samples[sample.seq]
        self._constraints.discard(sample.seq)
        if request.finished:
            self._close_request(request, reason)
        return text

    def _close_request(self, request: Request, reason: FinishReason) -> None:
        request.stamp_end(time.monotonic())
        self.observer.on_end(request.output())
        if self._targets is not None and reason in _GOOD:
            metrics = request.metrics
            self._meter.num_in_bounds += self._targets.hold(metrics.ttft, metrics.tpot)

    def _record_prompt(
        self, request: Request, report: StepOutput, first: int, entry: ScheduledTokens
    ) -> bool:
        """Store what one entry of a step says; False if a row of it is not finite."""
        scores, num_top = request.prompt_logprobs, request.params.prompt_logprobs
        assert scores is not None
        assert num_top is not None
        end = min(entry.start + entry.count, entry.seq.num_prompt - 1)
        rows = range(first, first + max(end - entry.start, 0))
        for position, row in enumerate(rows, entry.start + 1):
            scores[position] = logprob_entry(report, row, num_top, self._tokenizer)
        return bool(report.finite[rows].all())

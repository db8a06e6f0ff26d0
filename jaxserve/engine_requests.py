"""Requests of other threads, on the engine's own: submitted together, collected, ended early.

Knows `Engine.submit/abort/take`.  Does not know threads or asyncio: whoever calls this is between
two steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.answer import PromptLogprobs
from jaxserve.drive import take_finished
from jaxserve.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams
from scheduler import FinishReason

if TYPE_CHECKING:
    from jaxserve.engine import Engine

ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request to be; see `Engine.submit`."""

    prompt_token_ids: Seq[int]
    params: SamplingParams
    request_id: str | None = None
    prompt: str | None = None
    priority: int = 0
    key: str = ""
    whole: bool = False
    """Nobody looks at it before its end: only its result is reported."""


class Ending(NamedTuple):
    """What samples that are cut short are said to have ended with."""

    reason: str
    stop_reason: str | None = None


class Results(NamedTuple):
    """What has become known since the last step."""

    deltas: Seq[Delta]
    outputs: Seq[RequestOutput]
    """Of the requests that have ended; the engine has forgotten them."""
    prompt_logprobs: Mapping[str, PromptLogprobs]
    """Of the requests that want them and have their first delta here."""

    def __bool__(self) -> bool:
        return bool(self.deltas or self.outputs)


class EngineRequests:
    """The requests of an engine that nothing else submits to."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scored: set[str] = set()
        """Requests whose prompt log-probabilities have not been given yet."""
        self._whole: set[str] = set()
        """Requests of which only the end is reported."""

    def submit(self, asks: Seq[Ask]) -> None:
        """Submit all, or none if one is refused.

        Raises:
            ValueError: as `Engine.submit`.
        """
        submitted: list[str] = []
        try:
            for ask in asks:
                request_id = self._engine.submit(
                    ask.prompt_token_ids,
                    ask.params,
                    request_id=ask.request_id,
                    prompt=ask.prompt,
                    priority=ask.priority,
                    key=ask.key,
                    whole=ask.whole,
                )
                submitted.append(request_id)
                if ask.whole:
                    self._whole.add(request_id)
                elif ask.params.prompt_logprobs is not None:
                    self._scored.add(request_id)
        except BaseException:
            self.end(submitted, Ending(ABORT))
            raise

    def collect(self, deltas: Seq[Delta]) -> Results:
        """What a step's deltas mean for their requests."""
        outputs = list(take_finished(self._engine, deltas))
        if self._whole:
            deltas = [delta for delta in deltas if delta.request_id not in self._whole]
            self._whole.difference_update(output.request_id for output in outputs)
        scores: dict[str, PromptLogprobs] = {}
        if self._scored:
            taken = {output.request_id: output for output in outputs}
            for request_id in self._scored & {delta.request_id for delta in deltas}:
                output = taken.get(request_id) or self._engine.output(request_id)
                scores[request_id] = output.prompt_logprobs or []
            self._scored -= scores.keys()
        return Results(deltas, outputs, scores)

    def end(self, request_ids: Seq[str], ending: Ending) -> Results:
        """The one way to end requests early; what has ended before is left as it is."""
        deltas: list[Delta] = []
        outputs = []
        reason = FinishReason(ending.reason)
        for request_id in request_ids:
            try:
                last = self._engine.abort(request_id, reason)
            except ValueError:  # it has ended, or was refused
                continue
            output = self._engine.take(request_id)
            for delta in last:
                if delta.finish_reason == ending.reason:  # and not by a stop string found now
                    output.outputs[delta.index].stop_reason = ending.stop_reason
                    delta = replace(delta, stop_reason=ending.stop_reason)
                deltas.append(delta)
            outputs.append(output)
            self._scored.discard(request_id)
            self._whole.discard(request_id)
        return Results(deltas, outputs, {})

    def bury(self, request_ids: Seq[str], ending: Ending, error: str | None) -> Results:
        """What is left of requests when the engine can do no more; it is not called again."""
        deltas: list[Delta] = []
        outputs = []
        for request_id in request_ids:
            try:
                output = self._engine.output(request_id)
            except ValueError:  # it never came that far
                output = _nothing(request_id)
            output.error = error or output.error
            deltas += cut_short(output, ending)
            outputs.append(output)
        return Results(deltas, outputs, {})


def cut_short(output: RequestOutput, ending: Ending) -> list[Delta]:
    """Give the samples that have no end of their own the given one; the deltas that say so."""
    cut = [sample for sample in output.outputs if sample.finish_reason in (None, ABORT)]
    for sample in cut:
        sample.finish_reason, sample.stop_reason = ending
    output.finished = True
    return [Delta(output.request_id, sample.index, "", (), *ending) for sample in cut]


def _nothing(request_id: str) -> RequestOutput:
    metrics = RequestMetrics(arrival_time=time.monotonic())
    sample = CompletionOutput(0, "", [], None, None, None)
    return RequestOutput(request_id, None, [], None, [sample], False, metrics)

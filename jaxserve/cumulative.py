"""Deltas added up to outputs of a request that still runs, as vLLM's `generate` yields them."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import replace

from jaxserve.answer import Answer
from jaxserve.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams


class Cumulative:
    """What a request has given so far."""

    def __init__(
        self, answer: Answer, text: str | None, ids: list[int], params: SamplingParams
    ) -> None:
        """Begin with nothing.

        Args:
            answer: of the request.
            text: the prompt, if it was a text.
            ids: the prompt.
            params: what was asked for.
        """
        self._answer = answer
        self._prompt = (text, ids)
        self._metrics = RequestMetrics(arrival_time=time.monotonic())
        wants = params.logprobs is not None
        self._samples = [
            CompletionOutput(index, "", [], None, [] if wants else None, None)
            for index in range(params.n)
        ]

    def add(self, deltas: Seq[Delta]) -> RequestOutput:
        """Add deltas; the state with them, which later ones do not change."""
        for delta in deltas:
            sample = self._samples[delta.index]
            sample.text += delta.text
            sample.token_ids += delta.token_ids
            if sample.logprobs is not None:
                sample.logprobs += delta.logprobs or ()
            sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
        text, ids = self._prompt
        return RequestOutput(
            request_id=self._answer.request_id,
            prompt=text,
            prompt_token_ids=ids,
            prompt_logprobs=self._answer.prompt_logprobs,
            outputs=[
                replace(
                    sample,
                    token_ids=list(sample.token_ids),
                    logprobs=None if sample.logprobs is None else list(sample.logprobs),
                )
                for sample in self._samples
            ],
            finished=False,
            metrics=self._metrics,
        )

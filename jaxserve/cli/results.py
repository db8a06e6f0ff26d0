"""A finished sample as a JSON record and as text."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

_Positions = list[dict[int, Logprob] | None]


def sample_json(
    output: RequestOutput, sample: CompletionOutput, *, with_index: bool
) -> dict[str, Any]:
    """The record of a sample; log-probabilities, index and error only where there are any."""
    record: dict[str, Any] = {
        "prompt": output.prompt,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "metrics": _metrics(output.metrics),
    }
    if with_index:
        record["index"] = sample.index
    if output.prompt is None:
        record["prompt_token_ids"] = output.prompt_token_ids
    if sample.logprobs is not None:
        record["cumulative_logprob"] = sample.cumulative_logprob
        record["logprobs"] = _logprobs(list(sample.logprobs))
    if output.prompt_logprobs is not None:
        record["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    if output.error is not None:
        record["error"] = output.error
    return record


def sample_text(
    name: str, prompt: str | None, output: RequestOutput, sample: CompletionOutput
) -> str:
    """A heading with the prompt, and the text below it."""
    shown = f"{len(output.prompt_token_ids)} token ids" if prompt is None else prompt
    return f"[{name}] {shown}\n{sample.text}\n"


def _metrics(metrics: RequestMetrics) -> dict[str, Any]:
    values = dataclasses.asdict(metrics)
    # A reading of the monotonic clock means nothing outside the process.
    del values["arrival_time"]
    return values | {"tpot": metrics.tpot}


def _logprobs(positions: _Positions) -> list[dict[str, Any] | None]:
    return [
        None if position is None else {str(t): entry._asdict() for t, entry in position.items()}
        for position in positions
    ]

"""Offline throughput: a whole workload submitted at once, measured until its last token.

Knows the workload file.  Does not know the command line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from jaxserve.bench.report import make_report
from jaxserve.drive import run_all
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM


class WorkloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One request of a workload: a prompt as text or token ids, and how much to generate."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    max_tokens: int


def read_workload(path: str | Path, num_prompts: int | None = None) -> list[WorkloadRequest]:
    """Read a workload file, or its first `num_prompts` requests.

    Raises:
        ValueError: it is not a workload, or has fewer requests.
        OSError: it cannot be read.
    """
    try:
        requests = msgspec.json.decode(Path(path).read_bytes(), type=list[WorkloadRequest])
    except msgspec.DecodeError as error:
        raise ValueError(f"{str(path)!r} is not a workload file: {error}") from error
    for number, request in enumerate(requests):
        if (request.prompt is None) == (request.prompt_token_ids is None):
            raise ValueError(
                f"{str(path)!r}, request {number}: give one of prompt and prompt_token_ids"
            )
    if not requests:
        raise ValueError(f"{str(path)!r} has no requests")
    if num_prompts is not None and num_prompts > len(requests):
        raise ValueError(
            f"num_prompts={num_prompts}, but {str(path)!r} has {len(requests)} requests"
        )
    return requests[:num_prompts]


def measure(
    llm: LLM, requests: Sequence[WorkloadRequest], *, ignore_eos: bool = False
) -> dict[str, Any]:
    """Run the workload greedily and report `make_report`'s figures.

    Args:
        llm: its engine must be idle; its counters are reset.
        requests: all submitted before the first step, in this order.
        ignore_eos: generate `max_tokens` of each whatever the model says.

    Raises:
        ValueError: a request does not fit the model, naming its place in the workload.
    """
    llm.engine.reset_stats()
    start = time.monotonic()
    for number, request in enumerate(requests):
        params = SamplingParams(
            temperature=0, max_tokens=request.max_tokens, ignore_eos=ignore_eos, detokenize=False
        )
        token_ids = request.prompt_token_ids
        if token_ids is None:
            token_ids = llm.tokenizer.encode(request.prompt or "")
        try:
            llm.engine.submit(token_ids, params, whole=True)
        except ValueError as error:
            raise ValueError(f"request {number} of the workload: {error}") from error
    outputs = list(run_all(llm.engine))
    return make_report(outputs, time.monotonic() - start, llm.engine.stats())

"""Token counts of a request."""

from __future__ import annotations

import msgspec

from jaxserve.outputs import RequestOutput


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of a request over all its prompts and samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def usage(outputs: list[RequestOutput]) -> Usage:
    """Count the tokens; a prompt counts once however many samples it has."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(s.token_ids) for output in outputs for s in output.outputs)
    cached = sum(output.metrics.num_cached_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )

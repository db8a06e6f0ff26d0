"""The answer of `/v1/completions`: its JSON types, and how outputs become them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.protocol.completion_logprobs import CompletionLogprobs, completion_logprobs
from jaxserve.protocol.completion_request import CompletionRequest
from jaxserve.protocol.shared import Prompt
from jaxserve.protocol.usage import Usage

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One sample of one prompt, or the next piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    # With `return_token_ids`: of this piece, and in a sample's first piece of its prompt.
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Body of an answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(msgspec.Struct, kw_only=True):
    """A piece of a streamed answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


def completion_choice(
    index: int,
    request: CompletionRequest,
    prompt: Prompt,
    output: RequestOutput,
    sample: CompletionOutput,
    tokenizer: Tokenizer,
) -> CompletionChoice:
    """A finished sample; `index` counts over the samples of all prompts."""
    token_ids = list(sample.token_ids)
    positions: list[dict[int, Logprob] | None] = list(sample.logprobs or ())
    text = sample.text
    if request.echo:
        text = (prompt.text or "") + text
        token_ids = output.prompt_token_ids + token_ids
        positions = list(output.prompt_logprobs or ()) + positions
    logprobs = None
    if request.logprobs is not None:
        named_by_id = bool(request.return_tokens_as_token_ids)
        logprobs = completion_logprobs(token_ids, positions, tokenizer, named_by_id=named_by_id)
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        token_ids=sample.token_ids if request.return_token_ids else UNSET,
        prompt_token_ids=output.prompt_token_ids if request.return_token_ids else UNSET,
    )

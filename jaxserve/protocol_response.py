"""OpenAI response bodies, built from what the engine gives back.

Knows the JSON of both endpoints' non-streamed answers.  Does not know HTTP, batch files or how an
answer was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.protocol import ChatCompletionRequest, CompletionRequest, Prompt

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts of a request over all its prompts and samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry per token in each list.  The first token of an echoed prompt has no value.

    `text_offset` counts characters of the token texts; a character spread over several tokens
    shows as U+FFFD in each of them.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One sample of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Body of an answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(msgspec.Struct, kw_only=True):
    """One candidate of a position.  `bytes` is null where the token is part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, kw_only=True):
    """The sampled token of a position, with the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One entry per generated token."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer's text."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    """One sample."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """Body of an answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


def error_body(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = {404: "not_found_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def response_body(
    request: CompletionRequest | ChatCompletionRequest,
    prompts: list[Prompt],
    outputs: list[RequestOutput],
    tokenizer: Tokenizer,
    *,
    response_id: str,
    model: str,
    created: int,
) -> CompletionResponse | ChatCompletionResponse:
    """The body that answers `request`.

    Args:
        request: what was asked.
        prompts: its prompts, in order.
        outputs: the finished output of each prompt, in the same order.
        tokenizer: for the texts of echoed tokens.
        response_id: unique id, without the endpoint's prefix.
        model: the served model's name.
        created: Unix time in seconds.
    """
    if isinstance(request, ChatCompletionRequest):
        return ChatCompletionResponse(
            id=f"chatcmpl-{response_id}",
            created=created,
            model=model,
            choices=[
                _chat_choice(sample, request.top_logprobs or 0) for sample in outputs[0].outputs
            ],
            usage=usage(outputs),
        )
    samples = [
        (prompt, output, sample)
        for prompt, output in zip(prompts, outputs, strict=True)
        for sample in output.outputs
    ]
    return CompletionResponse(
        id=f"cmpl-{response_id}",
        created=created,
        model=model,
        choices=[
            _completion_choice(index, request, prompt, output, sample, tokenizer)
            for index, (prompt, output, sample) in enumerate(samples)
        ],
        usage=usage(outputs),
    )


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


def _chat_choice(sample: CompletionOutput, num_top: int) -> ChatChoice:
    return ChatChoice(
        index=sample.index,
        message=AssistantMessage(content=sample.text),
        logprobs=None if sample.logprobs is None else _chat_logprobs(sample, num_top),
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )


def _chat_logprobs(sample: CompletionOutput, num_top: int) -> ChatLogprobs:
    content = []
    for token_id, position in zip(sample.token_ids, sample.logprobs or (), strict=True):
        # The sampled token is always in `position`, and last where it is not one of the top.
        by_rank = sorted(position.values(), key=lambda entry: entry.rank)
        content.append(
            TokenLogprob(
                **_entry(position[token_id]),
                top_logprobs=[TopLogprob(**_entry(entry)) for entry in by_rank[:num_top]],
            )
        )
    return ChatLogprobs(content=content)


def _entry(entry: Logprob) -> dict[str, Any]:
    token = entry.decoded_token
    is_partial = "\N{REPLACEMENT CHARACTER}" in token
    return {
        "token": token,
        "logprob": entry.logprob,
        "bytes": None if is_partial else list(token.encode()),
    }


def _completion_choice(
    index: int,
    request: CompletionRequest,
    prompt: Prompt,
    output: RequestOutput,
    sample: CompletionOutput,
    tokenizer: Tokenizer,
) -> CompletionChoice:
    token_ids = list(sample.token_ids)
    positions: list[dict[int, Logprob] | None] = list(sample.logprobs or ())
    text = sample.text
    if request.echo:
        text = (prompt.text or "") + text
        token_ids = output.prompt_token_ids + token_ids
        positions = list(output.prompt_logprobs or ()) + positions
    wanted = request.logprobs is not None
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=_completion_logprobs(token_ids, positions, tokenizer) if wanted else None,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )


def _completion_logprobs(
    token_ids: list[int], positions: list[dict[int, Logprob] | None], tokenizer: Tokenizer
) -> CompletionLogprobs:
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    offset = 0
    for token_id, position in zip(token_ids, positions, strict=True):
        token = (
            tokenizer.token_text(token_id) if position is None else position[token_id].decoded_token
        )
        result.tokens.append(token)
        result.token_logprobs.append(None if position is None else position[token_id].logprob)
        result.top_logprobs.append(None if position is None else _by_text(position))
        result.text_offset.append(offset)
        offset += len(token)
    return result


def _by_text(position: dict[int, Logprob]) -> dict[str, float]:
    """Token text to log-probability; of tokens with one text the most likely stays."""
    entries = sorted(position.values(), key=lambda entry: entry.rank, reverse=True)
    return {entry.decoded_token: entry.logprob for entry in entries}

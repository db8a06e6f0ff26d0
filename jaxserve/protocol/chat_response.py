"""The answer of `/v1/chat/completions`: its JSON types, and how outputs become them."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.protocol.chat_logprobs import ChatLogprobs
from jaxserve.protocol.usage import Usage


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A function that the model wants called."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer's text.  It is null where there are only tool calls.

    Reasoning is there twice: `reasoning` is vLLM's name for it and `reasoning_content` others'.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One sample."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    # With `return_token_ids`.
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """Body of an answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    # With `return_token_ids`.
    prompt_token_ids: list[int] | UnsetType = UNSET


class ToolCallDelta(MessageToolCall, kw_only=True):
    """A tool call, numbered within its message; it is streamed in one piece."""

    index: int


class MessageDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the answer's message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The next piece of one sample."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    # With `return_token_ids`.
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """A piece of a streamed answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    # With `return_token_ids`, in the first chunk of each sample.
    prompt_token_ids: list[int] | UnsetType = UNSET

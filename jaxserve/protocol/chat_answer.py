"""The whole answer of `/v1/chat/completions`, from finished samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from jaxserve.outputs import CompletionOutput
from jaxserve.protocol.chat_logprobs import chat_logprobs
from jaxserve.protocol.chat_reader import ChatReader
from jaxserve.protocol.chat_request import ChatCompletionRequest
from jaxserve.protocol.chat_response import (
    AssistantMessage,
    ChatChoice,
    FunctionCall,
    MessageToolCall,
)
from jaxserve.protocol.parts import Parts

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


def chat_choice(
    request: ChatCompletionRequest,
    sample: CompletionOutput,
    reader: ChatReader,
    tokenizer: Tokenizer,
) -> ChatChoice:
    """A finished sample.

    Args:
        request: what was asked.
        sample: what the engine made.
        reader: takes the sample's text apart.
        tokenizer: for the bytes of tokens.
    """
    parts = reader.read(sample.text, ends=True)
    logprobs = None
    if sample.logprobs is not None:
        logprobs = chat_logprobs(request, sample.token_ids, sample.logprobs, tokenizer)
    return ChatChoice(
        index=sample.index,
        message=_message(parts, reader),
        logprobs=logprobs,
        finish_reason=reader.finish_reason(sample.finish_reason),
        stop_reason=sample.stop_reason,
        token_ids=sample.token_ids if request.return_token_ids else UNSET,
    )


def _message(parts: Parts, reader: ChatReader) -> AssistantMessage:
    calls = [
        MessageToolCall(
            id=reader.call_id(index),
            function=FunctionCall(name=call.name, arguments=call.arguments),
        )
        for index, call in enumerate(parts.tool_calls)
    ]
    return AssistantMessage(
        content=None if calls and not parts.content else parts.content,
        reasoning=parts.reasoning or UNSET,
        reasoning_content=parts.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )

"""The streamed answer of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.outputs import Delta
from jaxserve.protocol.chat_logprobs import ChatLogprobs, chat_logprobs
from jaxserve.protocol.chat_reader import ChatReader
from jaxserve.protocol.chat_request import ChatCompletionRequest
from jaxserve.protocol.chat_response import (
    ChatCompletionChunk,
    ChunkChoice,
    FunctionCall,
    MessageDelta,
    ToolCallDelta,
)
from jaxserve.protocol.parts import Parts
from jaxserve.protocol.shared import Prompt
from jaxserve.protocol.streaming import Head, PromptLogprobs, StreamedAnswer
from jaxserve.protocol.usage import Usage

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


class StreamedChat(StreamedAnswer):
    """Chunks of a message, the first of each sample naming its role.

    Args:
        request: what was asked.
        prompts: the prompt, as a list of one.
        head: what every chunk repeats.
        readers: one for each sample.
        tokenizer: for the bytes of tokens.
    """

    def __init__(
        self,
        request: ChatCompletionRequest,
        prompts: list[Prompt],
        head: Head,
        readers: Sequence[ChatReader],
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(request, prompts, head)
        self._request = request
        self._prompt = prompts[0]
        self._readers = readers
        self._tokenizer = tokenizer

    def start(self) -> list[msgspec.Struct]:
        """A chunk for each sample, with its role and no text."""
        choices = [
            ChunkChoice(index=index, delta=MessageDelta(role="assistant", content=""))
            for index in range(len(self._readers))
        ]
        chunks = [self._chunk([choice], self._counts()) for choice in choices]
        if self._wants_ids:
            for chunk in chunks:
                chunk.prompt_token_ids = self._prompt.token_ids
        return list[msgspec.Struct](chunks)

    def push(
        self, prompt_index: int, delta: Delta, prompt_logprobs: PromptLogprobs | None = None
    ) -> list[msgspec.Struct]:
        """See `StreamedAnswer.push`."""
        self._num_tokens += len(delta.token_ids)
        reader = self._readers[delta.index]
        num_calls = reader.num_calls
        parts = reader.read(delta.text, ends=delta.finish_reason is not None)
        has_tokens = bool(delta.token_ids) and self._wants_ids
        if not (parts or delta.finish_reason or delta.logprobs or has_tokens):
            return []
        choice = ChunkChoice(
            index=delta.index,
            delta=_message_delta(parts, reader, num_calls),
            logprobs=self._logprobs(delta),
            finish_reason=reader.finish_reason(delta.finish_reason),
            stop_reason=delta.stop_reason,
            token_ids=list(delta.token_ids) if self._wants_ids else UNSET,
        )
        return [self._chunk([choice], self._counts())]

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not delta.logprobs:
            return None
        return chat_logprobs(self._request, delta.token_ids, delta.logprobs, self._tokenizer)

    def _chunk(self, choices: list[Any], counts: Usage | UnsetType | None) -> ChatCompletionChunk:
        head = self._head
        return ChatCompletionChunk(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=counts
        )


def _message_delta(parts: Parts, reader: ChatReader, first: int) -> MessageDelta:
    calls = [
        ToolCallDelta(
            index=index,
            id=reader.call_id(index),
            function=FunctionCall(name=call.name, arguments=call.arguments),
        )
        for index, call in enumerate(parts.tool_calls, first)
    ]
    return MessageDelta(
        content=parts.content or UNSET,
        reasoning=parts.reasoning or UNSET,
        reasoning_content=parts.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )

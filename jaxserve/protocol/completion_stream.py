"""The streamed answer of `/v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.outputs import Delta
from jaxserve.protocol.completion_logprobs import CompletionLogprobs, completion_logprobs
from jaxserve.protocol.completion_request import CompletionRequest
from jaxserve.protocol.completion_response import CompletionChoice, CompletionChunk
from jaxserve.protocol.shared import Prompt
from jaxserve.protocol.streaming import Head, PromptLogprobs, StreamedAnswer
from jaxserve.protocol.usage import Usage

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


class StreamedCompletion(StreamedAnswer):
    """Chunks of text.  An echoed prompt is part of each sample's first chunk.

    Args:
        request: what was asked.
        prompts: its prompts, in order.
        head: what every chunk repeats.
        tokenizer: for the texts of echoed tokens.
    """

    def __init__(
        self, request: CompletionRequest, prompts: list[Prompt], head: Head, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, prompts, head)
        self._request = request
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._num_samples = request.n or 1
        self._offsets: dict[int, int] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}

    def push(
        self, prompt_index: int, delta: Delta, prompt_logprobs: PromptLogprobs | None = None
    ) -> list[msgspec.Struct]:
        """See `StreamedAnswer.push`."""
        self._num_tokens += len(delta.token_ids)
        if prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = prompt_logprobs
        index = prompt_index * self._num_samples + delta.index
        is_first = index not in self._offsets
        echoed = self._prompts[prompt_index] if is_first and self._request.echo else None
        self._offsets.setdefault(index, 0)
        text = ((echoed.text or "") if echoed else "") + delta.text
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._logprobs(index, prompt_index, delta, echoed)
        has_tokens = bool(delta.token_ids) and self._wants_ids
        has_logprobs = logprobs is not None and bool(logprobs.tokens)
        if not (text or delta.finish_reason or has_tokens or has_logprobs):
            return []
        choice = CompletionChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=list(delta.token_ids) if self._wants_ids else UNSET,
            prompt_token_ids=self._prompts[prompt_index].token_ids
            if self._wants_ids and is_first
            else UNSET,
        )
        return [self._chunk([choice], self._counts())]

    def _logprobs(
        self, index: int, prompt_index: int, delta: Delta, echoed: Prompt | None
    ) -> CompletionLogprobs:
        token_ids, positions = list(delta.token_ids), list[Any](delta.logprobs or ())
        if echoed is not None:
            token_ids = echoed.token_ids + token_ids
            positions = [*self._prompt_logprobs[prompt_index], *positions]
        logprobs = completion_logprobs(
            token_ids,
            positions,
            self._tokenizer,
            self._offsets[index],
            named_by_id=bool(self._request.return_tokens_as_token_ids),
        )
        if token_ids:
            last = self._tokenizer.token_text(token_ids[-1])
            self._offsets[index] = logprobs.text_offset[-1] + len(last)
        return logprobs

    def _chunk(self, choices: list[Any], counts: Usage | UnsetType | None) -> CompletionChunk:
        head = self._head
        return CompletionChunk(
            id=head.id, created=head.created, model=head.model, choices=choices, usage=counts
        )

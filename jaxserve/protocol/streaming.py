"""What the streamed answers of both endpoints share: chunks, as the samples grow.

Does not know the framing of chunks as server-sent events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from jaxserve.outputs import Delta, Logprob, RequestOutput
from jaxserve.protocol.shared import Prompt, SharedFields
from jaxserve.protocol.usage import Usage, usage

PromptLogprobs = Sequence[dict[int, Logprob] | None]
"""Candidates of each prompt position; the first has none."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats."""

    id: str
    model: str
    created: int


class StreamedAnswer(ABC):
    """Turns the deltas of a request's samples into chunks; made by `streamed_answer`.

    Args:
        request: what was asked.
        prompts: its prompts, in order.
        head: what every chunk repeats.
    """

    def __init__(self, request: SharedFields, prompts: list[Prompt], head: Head) -> None:
        options = request.stream_options
        self._head = head
        self._wants_usage = options is not None and bool(options.include_usage)
        self._wants_counts = options is not None and bool(options.continuous_usage_stats)
        self._wants_ids = bool(request.return_token_ids)
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_tokens = 0

    def start(self) -> list[msgspec.Struct]:
        """The chunks before the first token."""
        return []

    @abstractmethod
    def push(
        self, prompt_index: int, delta: Delta, prompt_logprobs: PromptLogprobs | None = None
    ) -> list[msgspec.Struct]:
        """The chunks that a delta gives, if any.

        Args:
            prompt_index: which of the prompts the delta's sample continues.
            delta: news of one sample.  After its finish reason there is nothing to push.
            prompt_logprobs: needed with the first delta of a prompt, where the request wants
                the log-probabilities of an echoed prompt.
        """

    def end(self, outputs: list[RequestOutput]) -> list[msgspec.Struct]:
        """The chunks after the last token.

        Args:
            outputs: the finished output of each prompt, in order.
        """
        return [self._chunk([], usage(outputs))] if self._wants_usage else []

    @abstractmethod
    def _chunk(self, choices: list[Any], counts: Usage | UnsetType | None) -> msgspec.Struct:
        """A chunk of the endpoint's type."""

    def _counts(self) -> Usage | UnsetType | None:
        """`usage` of a chunk that is not the last: null where a usage chunk follows."""
        if self._wants_counts:
            return Usage(
                prompt_tokens=self._num_prompt_tokens,
                completion_tokens=self._num_tokens,
                total_tokens=self._num_prompt_tokens + self._num_tokens,
            )
        return None if self._wants_usage else UNSET

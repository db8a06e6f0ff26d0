"""Reads the samples of a chat answer: which of their text is content, reasoning or tool calls.

Streamed and whole answers are read alike, so that they are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxserve.protocol.chat_request import ChatCompletionRequest
from jaxserve.protocol.parts import AnswerParser, Parts, PlainText
from jaxserve.protocol.shared import Prompt

if TYPE_CHECKING:
    from jaxserve.protocol.answer_format import AnswerFormat


class ChatReader:
    """Reads one sample.

    Args:
        request: what was asked.
        parser: takes the sample's text apart.
        name: unique for the sample, for the ids of its calls.
    """

    def __init__(self, request: ChatCompletionRequest, parser: AnswerParser, name: str) -> None:
        self._parser = parser
        self._name = name
        self._use = request.tool_use()
        self._shows_reasoning = request.include_reasoning is not False
        self.num_calls = 0
        """Calls read so far."""

    def read(self, text: str, *, ends: bool) -> Parts:
        """The parts that the next piece of text makes certain; all of them where it is the last."""
        parts = self._parser.push(text)
        if ends:
            parts += self._parser.end()
        most = None if self._use.allows_many else max(0, 1 - self.num_calls)
        calls = parts.tool_calls[:most]
        self.num_calls += len(calls)
        return Parts(parts.content, parts.reasoning if self._shows_reasoning else "", calls)

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's name for the end: it is "tool_calls" if there are any.

        A cut answer stays "length", and one with the call that `tool_choice` named is "stop".
        """
        made_calls = self.num_calls > 0 and not self._use.is_named
        return "tool_calls" if made_calls and reason == "stop" else reason

    def call_id(self, index: int) -> str:
        """The id of the sample's call with this number."""
        return f"call_{self._name}_{index}"


def chat_readers(
    request: ChatCompletionRequest,
    prompt: Prompt,
    answer_format: AnswerFormat | None,
    response_id: str,
) -> Iterator[ChatReader]:
    """Readers of the samples of an answer, in order.

    Args:
        request: what was asked.
        prompt: its prompt.
        answer_format: how the model writes reasoning and tool calls; None for plain text.
        response_id: unique id of the answer.
    """
    for index in range(request.n or 1):
        parser = _parser(request, prompt, answer_format)
        yield ChatReader(request, parser, f"{response_id}_{index}")


def _parser(
    request: ChatCompletionRequest, prompt: Prompt, answer_format: AnswerFormat | None
) -> AnswerParser:
    use = request.tool_use()
    if use.is_forced:
        from jaxserve.protocol.answer_format import forced_format

        answer_format = forced_format(answer_format)
    if answer_format is None:
        return PlainText()
    return answer_format.parser(
        prompt,
        use.for_template() or (),
        shows_special_tokens=request.skip_special_tokens is False,
    )

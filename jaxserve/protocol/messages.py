"""The messages of a conversation, as clients send them and as chat templates want them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.chat import RESERVED
from jaxserve.protocol.errors import RequestError


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text, and the text of a refusal, is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str | None:
        """What it says, if it is of a supported type."""
        return {"text": self.text, "refusal": self.refusal}.get(self.type)


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation.  A list of text parts means their concatenation.

    `reasoning` and `reasoning_content` are the same: a past answer's, for templates that show it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    # Instead of content, in a past answer.
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: text content, and "developer" is "system"."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._text(),
            "name": self.name,
            "tool_calls": self.tool_calls and [_for_template(call) for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return {name: value for name, value in message.items() if value is not None}

    def _text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.tool_calls or self.refusal:
                return self.refusal or ""
            raise RequestError(f"messages: the {self.role} message has no content", "messages")
        if not self.content:
            raise RequestError(
                f"messages: the content of the {self.role} message is an empty list", "messages"
            )
        for part in self.content:
            if part.words is None:
                raise RequestError(
                    f"messages: a content part of type {part.type!r}; only parts of type 'text' "
                    "with a 'text' are supported",
                    "messages",
                )
        return "".join(part.words or "" for part in self.content)


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """The value of `chat_template_kwargs`, as the template's own variables.

    Raises:
        RequestError: one of them has a name that is not the caller's to give.
    """
    variables = given or {}
    if taken := sorted(RESERVED & variables.keys()):
        raise RequestError(
            f"chat_template_kwargs has {taken[0]!r}, which is not a variable of the template's own",
            "chat_template_kwargs",
        )
    return variables


def _for_template(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as an object: templates write them as JSON themselves.

    Arguments that are not the JSON of an object, as a model may have written, stay as they are.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"], type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}

"""Conversations to text: what a message may be, and rendering with the model's template.

Knows Jinja through transformers, which is imported on the first use only.  Knows no tokens.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "self",
        "tools",
    }
)
"""Names that template variables of the caller may not take."""


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages with plain string contents and without null fields.

    A content that is a list of text parts is joined with nothing between the parts.

    Raises:
        ValueError: there are none; one is no mapping, has no role, or has a content or a part
            that is not text.
    """
    if not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty; give at least one")
    return [_check_message(message, i) for i, message in enumerate(messages)]


def _check_message(message: Any, i: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{i}] must be a mapping, not {type(message).__name__}")
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise ValueError(f"messages[{i}] has role {message.get('role')!r}; it must be a string")
    checked = {key: value for key, value in message.items() if value is not None}
    if "content" in checked:
        checked["content"] = _content_text(checked["content"], f"messages[{i}].content")
    elif not checked.get("tool_calls"):
        raise ValueError(f"messages[{i}] has no content")
    return checked


def _content_text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where} must be a string or a list of text parts")
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise ValueError(f"{where} is of type {kind!r}; this model reads text parts only")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where} must have its text as a string")
    return str(part["text"])


def render(
    template: str | None,
    messages: list[dict[str, Any]],
    *,
    tools: list[Any] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Render a conversation with a Jinja template, in a sandbox.

    Args:
        template: the Jinja text.
        messages: from `check_messages`.
        tools: JSON schemas of functions.
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: whatever else the template may use.

    Raises:
        ValueError: no template, one that is not valid, or one that refuses the conversation.
    """
    if template is None:
        raise ValueError(
            "this model has no chat template; use plain completions, or give a template with "
            "--chat-template"
        )
    if taken := sorted(RESERVED & set(variables)):
        raise ValueError(f"template variable {taken[0]!r} is reserved; give it another name")
    try:
        rendered, _ = _renderer()(
            [messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except Exception as error:  # a template is data: whatever it raises is about the request
        raise ValueError(f"the chat template refuses this conversation: {error}") from error
    return str(rendered[0])


@functools.cache
def _renderer() -> Callable[..., tuple[list[str], Any]]:
    with without_advice():
        from transformers.utils.chat_template_utils import render_jinja_template
    renderer: Callable[..., tuple[list[str], Any]] = render_jinja_template
    return renderer


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Import something of transformers without its advice to install PyTorch."""
    advice = logging.getLogger("transformers")
    advice.addFilter(_nothing)
    try:
        yield
    finally:
        advice.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False

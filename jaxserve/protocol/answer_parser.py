"""Takes an answer apart as a response template describes it, with transformers' parser.

The parser finds where reasoning, tool calls and content begin and end.  The text of a tool call is
read once it is complete; one that cannot be read is given back as content, letter by letter, so
that nothing the model wrote is lost.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxserve.chat import without_advice
from jaxserve.protocol.parts import Parts, ToolCall

with without_advice():
    from transformers.utils.chat_parsing import ResponseParser, parse_response
    from transformers.utils.chat_parsing.response_templates import (
        ResponseTemplate,
        load_response_template,
    )

CALLS = "tool_calls"
CONTENT = "content"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""The names that templates give to reasoning."""

_OPEN, _CLOSE = "open_text", "close_text"


class CompiledTemplate:
    """A response template in the forms that parsers need.

    Args:
        template: as transformers documents it.

    Raises:
        ValueError: it is not a valid response template.
    """

    def __init__(self, template: Mapping[str, Any]) -> None:
        fields = {
            name: {**field, "optional": True} if isinstance(field, Mapping) else field
            for name, field in dict(template.get("fields") or {}).items()
        }
        lenient = copy.deepcopy({**template, "fields": fields})
        self.whole: ResponseTemplate = load_response_template(lenient)
        """For the text of a single call."""
        marked = {name: _as_text(field) for name, field in fields.items()}
        texts = {name: field for name, field in marked.items() if name != CALLS}
        self.without_calls: ResponseTemplate = load_response_template(
            {**lenient, "fields": texts or {CONTENT: {"content": "text"}}}
        )
        """For an answer in which calls are content."""
        self.with_calls: ResponseTemplate = load_response_template({**lenient, "fields": marked})
        """For an answer, with the text of calls as it was written."""

    def after_anchor(self, prompt: str) -> str:
        """What the prompt has already written of the answer."""
        ends = [match.end() for match in self.whole.start_anchor_re.finditer(prompt)]
        return prompt[ends[-1] :] if ends else ""


def _as_text(field: Mapping[str, Any]) -> dict[str, Any]:
    """A field that gives its text and the marks around it, and cannot fail to be read."""
    result: dict[str, Any] = {"repeats": True, "content": "text", "content_args": {"strip": False}}
    result["transform"] = {"body": "{content}"}
    opening, closing = _pattern(field, "open"), _pattern(field, "close")
    if opening is not None:
        # The empty group is there for a call that ends with the answer, before its closing mark.
        result["open_pattern"] = f"(?P<{_OPEN}>{opening})(?P<{_CLOSE}>)"
        result["transform"] |= {"open": f"{{{_OPEN}}}", "close": f"{{{_CLOSE}}}"}
    if closing is not None:
        result["close_pattern"] = f"(?P<{_CLOSE}>{closing})"
    return result


def _pattern(field: Mapping[str, Any], which: str) -> str | None:
    literals = field.get(which)
    if literals is None:
        return field.get(f"{which}_pattern")
    texts = [literals] if isinstance(literals, str) else sorted(literals, key=len, reverse=True)
    return "|".join(map(re.escape, texts))


class TemplateParser:
    """Parses one answer.

    Args:
        template: how it is written.
        prefix: what the prompt has written of it already.
        tools: the functions that may be called; without any, what looks like a call is content.
        hidden: texts that are left out of content and reasoning.
    """

    def __init__(
        self,
        template: CompiledTemplate,
        prefix: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self._template = template
        self._tools = list(tools)
        scanned = template.with_calls if tools else template.without_calls
        self._parser = ResponseParser(scanned, prefix="")
        self._reasoning = _Trimmed(drops_leading=True)
        self._content = _Trimmed(drops_leading=bool(prefix))
        self._hidden = re.compile("|".join(map(re.escape, sorted(hidden))) or "(?!)")
        self.in_reasoning = False
        """The text goes on within reasoning."""
        self.has_reasoned = False
        """Reasoning has ended."""
        self._take(self._parser.feed(prefix))

    def push(self, text: str) -> Parts:
        """The parts that are certain now."""
        return self._take(self._parser.feed(text))

    def end(self) -> Parts:
        """The rest, once no more text comes."""
        _, events = self._parser.finalize()
        return self._take(events) + Parts(content=self._content.end())

    def _take(self, events: Iterable[Mapping[str, Any]]) -> Parts:
        parts = Parts()
        for event in events:
            field = event["field"]
            if field in REASONING:
                parts += self._take_reasoning(event)
            elif field == CONTENT and event["type"] == "region_chunk":
                parts += Parts(content=self._content.push(self._visible(event)))
            elif field == CALLS and event["type"] == "region_close":
                parts += self._take_call(event["value"])
        return parts

    def _take_reasoning(self, event: Mapping[str, Any]) -> Parts:
        if event["type"] == "region_chunk":
            return Parts(reasoning=self._reasoning.push(self._visible(event)))
        self.in_reasoning = event["type"] == "region_open"
        self.has_reasoned = not self.in_reasoning
        self._reasoning.restart()
        self._content.restart()
        return Parts()

    def _visible(self, event: Mapping[str, Any]) -> str:
        return self._hidden.sub("", event["text"])

    def _take_call(self, value: Mapping[str, str]) -> Parts:
        text = value.get("open", "") + value["body"] + value.get("close", "")
        calls = self._read_calls(text)
        if calls is None:
            return Parts(content=self._content.push(text))
        self._content.restart()
        return Parts(tool_calls=calls)

    def _read_calls(self, text: str) -> tuple[ToolCall, ...] | None:
        try:
            message = parse_response(text, self._template.whole, prefix="", tools=self._tools)
            return tuple(_tool_call(value) for value in _flat(message[CALLS]))
        except (ValueError, KeyError, TypeError, RecursionError):  # the model wrote nonsense
            return None


class _Trimmed:
    """Text without the blanks at its ends, where these only separate it from something else."""

    def __init__(self, *, drops_leading: bool) -> None:
        self._drops_leading = drops_leading
        self._blanks = ""

    def push(self, text: str) -> str:
        """The text that is certain; blanks at the end wait for what follows them."""
        text = self._blanks + text
        if self._drops_leading:
            text = text.lstrip()
        certain = text.rstrip()
        self._blanks = text[len(certain) :]
        self._drops_leading = self._drops_leading and not certain
        return certain

    def end(self) -> str:
        """The blanks that nothing follows."""
        return "" if self._drops_leading else self._blanks

    def restart(self) -> None:
        """Something else comes between."""
        self._drops_leading, self._blanks = True, ""


def _flat(value: Any) -> Iterable[Any]:
    """Calls, from a list that may hold lists, as some models write several calls in one."""
    for item in value:
        function = item["function"] if isinstance(item, Mapping) else None
        if isinstance(item, list):
            yield from _flat(item)
        elif isinstance(function, list):
            yield from ({"function": one} for one in function)
        else:
            yield item


def _tool_call(value: Any) -> ToolCall:
    function = value["function"]
    name, arguments = function["name"], function.get("arguments", function.get("parameters", {}))
    if not isinstance(name, str) or not name:
        raise ValueError(f"name={name!r}")
    if not isinstance(arguments, str):
        arguments = _json_text(arguments)
    name.encode(), arguments.encode()  # lone surrogates can be in no answer
    return ToolCall(name, arguments)


def _json_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text

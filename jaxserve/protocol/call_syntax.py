"""How a model writes a call, read backwards from the response template that parses calls.

Covers templates whose calls are JSON between marks of fixed text.  What is derived is not trusted:
made-up calls are written with it, and it counts only as far as the parser reads them back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.protocol.answer_parser import CALLS, CompiledTemplate, TemplateParser

_NAME, _JSON_NAME = "\x00", "\x01"
"""Stand for the function's name, as it is and as it is within a JSON string."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The texts around calls, with `_NAME` and `_JSON_NAME` in them."""

    opening: str
    """Before a call, or before a list of calls."""
    before: str
    """Before a call's arguments."""
    after: str
    """After a call's arguments."""
    closing: str
    """After a call, or after a list of calls."""
    is_list: bool
    """Calls are the items of one JSON list, rather than one after another."""

    @property
    def separator(self) -> str:
        """Between calls."""
        return ", " if self.is_list else "\n"

    def around(self, name: str) -> tuple[str, str]:
        """What stands before and after the arguments of a call of a function."""
        before, after = self.before, self.after
        if not self.is_list:
            before, after = self.opening + before, after + self.closing
        return _named(before, name), _named(after, name)

    @property
    def outer(self) -> tuple[str, str]:
        """What stands before and after all calls."""
        return (self.opening + "[", "]" + self.closing) if self.is_list else ("", "")

    def reads_back(self, template: CompiledTemplate, *names: str) -> bool:
        """Whether a parser finds calls that are written like this."""
        first, last = self.outer
        calls = self.separator.join("{}".join(self.around(name)) for name in names)
        parser = TemplateParser(template, "", [{"function": {"name": name}} for name in names])
        parts = parser.push(first + calls + last) + parser.end()
        found = [(call.name, call.arguments) for call in parts.tool_calls]
        return found == [(name, "{}") for name in names] and not parts.content


def call_syntax(template: Mapping[str, Any]) -> CallSyntax | None:
    """The syntax of a template's calls, or None for one that is not covered."""
    field = template["fields"].get(CALLS)
    if field is None or field.get("content") != "json":
        return None
    opening, closing = _fixed_text(field, "open"), _fixed_text(field, "close")
    payload = _payload(field)
    if opening is None or payload is None:
        return None
    is_list = bool(field.get("transform_each"))
    # Where the closing mark is the end of the answer, the parser does without it.
    return CallSyntax(opening, *payload, closing or "", is_list)


def _payload(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """The JSON around the arguments."""
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, Mapping) else None
    each = bool(field.get("transform_each"))
    if function == "{content}":
        return _object("name", "arguments")
    if not isinstance(function, Mapping):
        return None
    if function.get("arguments") == "{content}" and not each:
        return "", ""  # the name is in the opening mark
    path = r"\{(\w+)\}" if each else r"\{content\.(\w+)\}"
    keys = [re.fullmatch(path, str(function.get(key))) for key in ("name", "arguments")]
    return _object(*(key[1] for key in keys if key)) if all(keys) else None


def _object(name: str, arguments: str) -> tuple[str, str]:
    return f'{{{json.dumps(name)}: "{_JSON_NAME}", {json.dumps(arguments)}: ', "}"


def _fixed_text(field: Mapping[str, Any], which: str) -> str | None:
    """A text that opens or closes a call; None where a pattern is too free to choose one."""
    literals = field.get(which, "")
    if literals:
        return str(literals) if isinstance(literals, str) else str(literals[0])
    return _matching(field.get(f"{which}_pattern", ""))


_SIMPLE = re.compile(
    r"""
      (?P<name> \(\?P<\w+>(?:\[[^\]]*\]|\\.|[^()\[\]])*\) )   # a named group: the function's name
    | (?P<nothing> \\A | \\s\* | \(\?=.*\)$ | \(\?:(?:\\.|[^()])*\)\? )
    | (?P<newline> \\n\?? | \\s\+ )
    | \\(?P<escaped> [^\w\s] )
    | (?P<plain> [^\\\[\](){}.*+?^$|] )
    """,
    re.VERBOSE | re.DOTALL,
)


def _matching(pattern: str) -> str | None:
    """A text that a pattern of simple parts matches."""
    text, position = "", 0
    while position < len(pattern):
        match = _SIMPLE.match(pattern, position)
        if match is None:
            return None
        position = match.end()
        if match["name"]:
            text += _NAME
        elif match["newline"]:
            text += "\n"
        else:
            text += match["escaped"] or match["plain"] or ""
    return text


def _named(text: str, name: str) -> str:
    return text.replace(_JSON_NAME, json.dumps(name)[1:-1]).replace(_NAME, name)

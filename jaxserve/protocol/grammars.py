"""Grammars of answers: calls that must be made, and constraints that begin after reasoning.

Lark's notation, as llguidance reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.json_schema import WHITESPACE, enforceable
from jaxserve.protocol.errors import RequestError
from jaxserve.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxserve.protocol.call_syntax import CallSyntax
    from jaxserve.protocol.marks import Marks

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as chat templates write it; a model has no other blanks to choose, or to lose itself in."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_grammar(
    syntax: CallSyntax,
    functions: Mapping[str, Mapping[str, Any] | None],
    marks: Marks,
    *,
    allows_many: bool,
) -> dict[str, str]:
    """Rules, `answer` among them, for an answer that consists of calls.

    Args:
        syntax: how calls are written.
        functions: the schema of each function's arguments, by its name.
        marks: the tokens that are no text.
        allows_many: there may be several calls.
    """
    rules = {}
    for index, (name, schema) in enumerate(functions.items()):
        before, after = syntax.around(name)
        rules[f"call_{index}"] = f"{marks.lark(before)} arguments_{index} {marks.lark(after)}"
        rules[f"arguments_{index}"] = json_rule(_arguments(schema), compact=True)
    rules["call"] = " | ".join(f"call_{index}" for index in range(len(functions)))
    more = f" ({marks.lark(syntax.separator)} call)*" if allows_many else ""
    first, last = syntax.outer
    return {"answer": f"{marks.lark(first)} call{more} {marks.lark(last)}", **rules}


def constraint_grammar(constraint: StructuredOutputsParams, marks: Marks) -> dict[str, str] | None:
    """Rules, `answer` among them, for a constraint; None for one that is a grammar itself."""
    if constraint.regex is not None:
        return {"answer": _terminal(constraint.regex)}
    if constraint.choice is not None:
        return {"answer": _one_of(constraint.choice, marks)}
    if constraint.json is not None:
        return {"answer": json_rule(_schema(constraint.json))}
    return {"answer": json_rule({"type": "object"})} if constraint.json_object else None


def json_rule(schema: Mapping[str, Any], *, compact: bool = False) -> str:
    """The right side of a rule for the JSON values of a schema.

    Raises:
        RequestError: the schema is nested too deeply.
    """
    blanks = _COMPACT if compact else {"whitespace_pattern": WHITESPACE}
    try:
        return f"%json {json.dumps(enforceable(schema, **blanks))}"
    except RecursionError:
        raise RequestError("a JSON schema is nested too deeply to be enforced") from None


def after_reasoning(
    rules: Mapping[str, str], marks: Marks, opening: str, closing: str, *, is_open: bool
) -> dict[str, str]:
    """Rules for an answer that reasons first: it may, or it goes on with what the prompt opened.

    Args:
        rules: for what follows, with `answer` among them.
        marks: the tokens that are no text.
        opening: the mark before reasoning.
        closing: the mark after it.
        is_open: the prompt ends within reasoning.
    """
    if closing in marks.ids:
        reasoning = {"reasoning": f"ANYTHING {marks.lark(closing)}", "ANYTHING": "/(?s:.*)/"}
    else:
        reasoning = {f"reasoning[suffix={json.dumps(closing)}]": "/(?s:.*)/"}
    first = "reasoning" if is_open else f"({marks.lark(opening)} reasoning"
    blanks = '("\\n" "\\n"?)?'
    start = f"{first} {blanks}" if is_open else f"{first} {blanks})?"
    return {"start": f"{start} answer", **reasoning, **rules}


def grammar_text(rules: Mapping[str, str]) -> str:
    """The grammar of rules; it begins with `start`, or with `answer` where there is no `start`."""
    if "start" not in rules:
        rules = {"start": "answer", **rules}
    return "".join(f"{name}: {body}\n" for name, body in rules.items())


def _schema(schema: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(schema, str):
        return schema
    try:
        decoded = json.loads(schema)
    except ValueError as error:
        raise RequestError(
            f"structured_outputs.json is not valid JSON: {error}", "structured_outputs"
        ) from error
    if not isinstance(decoded, dict):
        raise RequestError("structured_outputs.json is not a JSON object", "structured_outputs")
    return decoded


def _arguments(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A function's schema; one without parameters, or with an empty list of them, has none."""
    if not schema:
        return _NO_ARGUMENTS
    open_ended = {"additionalProperties", "patternProperties"} & schema.keys()
    is_empty = schema.get("type") == "object" and schema.get("properties") == {}
    return _NO_ARGUMENTS if is_empty and not open_ended else schema


def _one_of(choices: Sequence[str], marks: Marks) -> str:
    """Alternatives: the texts as one expression, those with tokens in them one by one."""
    texts = [text for text in choices if not marks.are_in(text)]
    rules = [f"({marks.lark(text)})" for text in choices if marks.are_in(text)]
    return " | ".join([_terminal("|".join(map(re.escape, texts))), *rules] if texts else rules)


def _terminal(regex: str) -> str:
    """A regular expression as Lark writes it: between slashes, on one line."""
    text, is_escaped = "", False
    for char in regex:
        if char in _ESCAPES and not (char == "/" and is_escaped):
            text = (text[:-1] if is_escaped else text) + _ESCAPES[char]
        else:
            text += char
        is_escaped = char == "\\" and not is_escaped
    return f"/{text}/"


_ESCAPES = {"/": "\\/", "\n": "\\n", "\r": "\\r"}

"""JSON schemas as llguidance takes them.

Knows the keywords that need care.  Does not know requests or matchers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration"),
        *("email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"),
    }
)
"""Values of "format" that llguidance enforces; it refuses others."""
WHITESPACE = r"(\n[ \t]{0,16}| )?"
"""Between the parts of a JSON value: none, a space, or a new line and its indentation.  A small
model may else go on with it for ever."""
_DATA = frozenset({"const", "default", "enum", "example", "examples", "x-guidance"})
"""Keywords whose values are no schemas."""
_BY_NAME = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
"""Keywords whose values are schemas by names, which may be those of keywords."""


def enforceable(schema: Mapping[str, Any], **guidance: Any) -> dict[str, Any]:
    """A schema without what is only said about values, and not enforced.

    A format that is not known is an annotation (JSON Schema 2020-12, validation, section 7.2.1), as
    generators of schemas write them for passwords, paths and bytes.

    Args:
        schema: any; it is not changed.
        guidance: llguidance's options, which those in the schema's own `x-guidance` come before.

    Raises:
        RecursionError: it is nested too deeply.
    """
    checked: dict[str, Any] = _checked(schema)
    own = schema.get("x-guidance")
    return {**checked, "x-guidance": {**guidance, **(own if isinstance(own, Mapping) else {})}}


def _checked(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_checked(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: _value(name, value)
        for name, value in schema.items()
        if name != "format" or not isinstance(value, str) or value in FORMATS
    }


def _value(name: str, value: Any) -> Any:
    if name in _DATA:
        return value
    if name in _BY_NAME and isinstance(value, Mapping):
        return {key: _checked(item) for key, item in value.items()}
    return _checked(value)

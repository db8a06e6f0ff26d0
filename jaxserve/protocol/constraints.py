"""Request fields that constrain the text of an answer: `response_format`, `structured_outputs`.

Knows their JSON types and the engine's form of them.  Does not know tools or reasoning.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.protocol.errors import RequestError, request_error
from jaxserve.structured import StructuredOutputsParams


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """`response_format` of an answer without constraint."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """`response_format` of an answer that is any JSON object."""


class JsonSchema(msgspec.Struct, kw_only=True):
    """A schema and its name.  Without a schema the answer is any JSON object.

    `strict` makes no difference: the schema is always enforced.
    """

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """`response_format` of an answer that a schema describes."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one constraint."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def constraint(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> StructuredOutputsParams | None:
    """What the two fields ask of the engine.

    Raises:
        RequestError: both constrain the answer, or `structured_outputs` is not one constraint.
    """
    asked = _of_format(response_format)
    if structured_outputs is None:
        return asked
    if asked is not None:
        raise RequestError(
            "structured_outputs and response_format both constrain the answer; give one",
            "structured_outputs",
        )
    try:
        return StructuredOutputsParams(**msgspec.structs.asdict(structured_outputs))
    except ValueError as error:
        raise request_error(error) from error


def _of_format(response_format: ResponseFormat | None) -> StructuredOutputsParams | None:
    if response_format is None or isinstance(response_format, TextFormat):
        return None
    if isinstance(response_format, JsonSchemaFormat):
        schema = response_format.json_schema.schema
        if schema is not None:
            return StructuredOutputsParams(json=schema)
    return StructuredOutputsParams(json_object=True)

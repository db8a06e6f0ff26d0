"""One line of an OpenAI Batch input file: what it asks, or why it cannot be answered.

Knows JSON and the endpoints.  Does not know files (`batch_file.py`) or the engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    RequestError,
    check_model,
    convert_body,
)

ENDPOINTS: dict[str, type[CompletionRequest] | type[ChatCompletionRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}


@dataclass(frozen=True, slots=True)
class LineRequest:
    """An input line, checked."""

    custom_id: str
    request_id: str
    request: CompletionRequest | ChatCompletionRequest


@dataclass(frozen=True, slots=True)
class LineError:
    """Why an input line cannot be answered."""

    custom_id: str | None
    request_id: str
    error: RequestError


def parse_line(raw: bytes, model: str) -> LineRequest | LineError:
    """Check everything about a line that needs no tokenizer.

    Args:
        raw: the line, without its end.
        model: the served model; its name is part of the hash, so that another model's answers are
            not taken for this one's.
    """
    custom_id = None
    request_id = _request_id(raw, model)
    try:
        line = _json_object(raw)
        if isinstance(line.get("custom_id"), str):
            custom_id = line["custom_id"]
        # Sorted keys: the order of a client's JSON does not make it another request.
        request_id = _request_id(
            msgspec.json.encode([line.get("url"), line.get("body")], order="sorted"), model
        )
        return LineRequest(_custom_id(line), request_id, _request(line, model))
    except RequestError as error:
        return LineError(custom_id, request_id, error)


def _request_id(content: bytes, model: str) -> str:
    digest = hashlib.sha256(model.encode() + b"\0" + content).hexdigest()
    return f"req_{digest[:32]}"


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        # The JSON parser skips over bytes it has no use for; invalid text is an error all the same.
        raw.decode("utf-8")
        line = msgspec.json.decode(raw)
    except UnicodeDecodeError as error:
        raise RequestError(f"not valid UTF-8 at byte {error.start}", code="invalid_json") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(line, dict):
        raise RequestError(
            f"a JSON {_JSON_NAMES[type(line)]}, not an object", code="invalid_request"
        )
    return line


_JSON_NAMES = {
    list: "array",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def _custom_id(line: dict[str, Any]) -> str:
    custom_id = line.get("custom_id")
    if custom_id is None:
        raise RequestError("custom_id is missing", "custom_id", "missing_required_parameter")
    if not isinstance(custom_id, str):
        raise RequestError(f"custom_id={custom_id!r} must be a string", "custom_id", "invalid_type")
    return custom_id


def _request(line: dict[str, Any], model: str) -> CompletionRequest | ChatCompletionRequest:
    if line.get("method", "POST") != "POST":
        raise RequestError(f"method={line['method']!r} must be 'POST'", "method", "invalid_method")
    url = line.get("url")
    if not isinstance(url, str) or url not in ENDPOINTS:
        raise RequestError(
            f"url={url!r} is not one of {', '.join(ENDPOINTS)}", "url", "invalid_url"
        )
    if not isinstance(line.get("body"), dict):
        raise RequestError("body is missing or not an object", "body", "missing_required_parameter")
    request = convert_body(line["body"], ENDPOINTS[url])
    if request.stream:
        raise RequestError("stream: a batch file is not streamed; leave it out", "stream")
    check_model(request, (model,))
    request.sampling_params()
    return request

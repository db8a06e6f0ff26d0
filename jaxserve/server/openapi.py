"""`/openapi.json`: the endpoints described for machines, from the types that decode their bodies.

Knows OpenAPI 3.1.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import jaxserve
from jaxserve.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.protocol.chat_response import ChatCompletionResponse
from jaxserve.protocol.completion_response import CompletionResponse
from jaxserve.server.admin import AbortRequest
from jaxserve.server.errors import json_response
from jaxserve.server.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)


class ErrorDetails(msgspec.Struct, kw_only=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every response with a status of 400 or more."""

    error: ErrorDetails


_POSTED = {
    "/v1/completions": (CompletionRequest, CompletionResponse, "Complete prompts"),
    "/v1/chat/completions": (
        ChatCompletionRequest,
        ChatCompletionResponse,
        "Answer a conversation",
    ),
    "/tokenize": (TokenizeRequest, TokenizeResponse, "Token ids of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, DetokenizeResponse, "Text of token ids"),
    "/abort_request": (AbortRequest, None, "End an open request"),
}
_GOT = {
    "/v1/models": "The served names of the model",
    "/v1/models/{model}": "One of them",
    "/tokenizer_info": "Special tokens and chat template",
    "/health": "Whether the server lives",
    "/ready": "Whether new requests are welcome",
    "/version": "The version",
    "/server_info": "Configuration, and what was allocated and compiled",
    "/server_status": "Figures of the status page",
    "/metrics": "Prometheus metrics",
}
_STREAMED = ("/v1/completions", "/v1/chat/completions")
_JSON = "application/json"
_OTHER_TYPES = {"/metrics": "text/plain"}


async def openapi(request: Request) -> Response:
    """The description."""
    root: str = request.scope.get("root_path", "")
    where = {"servers": [{"url": root}]} if root else {}
    return json_response(description() | where)


@functools.cache
def description() -> dict[str, Any]:
    """The OpenAPI document."""
    types: list[Any] = [ErrorResponse]
    for request_type, response_type, _ in _POSTED.values():
        types += [request_type] if response_type is None else [request_type, response_type]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    refs = dict(zip(types, schemas, strict=True))
    error = {"description": "Error", "content": {_JSON: {"schema": refs[ErrorResponse]}}}
    paths: dict[str, Any] = {
        path: {"post": _post(path, refs[asked], refs.get(answer), summary, error)}
        for path, (asked, answer, summary) in _POSTED.items()
    }
    paths |= {path: {"get": _get(path, summary, error)} for path, summary in _GOT.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": jaxserve.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(path: str, asked: Any, answer: Any, summary: str, error: Any) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": answer or {"type": "object"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {_JSON: {"schema": asked}}},
        "responses": {
            "200": {"description": summary, "content": content},
            "4XX": error,
            "5XX": error,
        },
    }


def _get(path: str, summary: str, error: Any) -> dict[str, Any]:
    kind = _OTHER_TYPES.get(path, _JSON)
    schema = {"type": "object" if kind == _JSON else "string"}
    named = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    return {
        "summary": summary,
        **({"parameters": named} if named else {}),
        "responses": {
            "200": {"description": summary, "content": {kind: {"schema": schema}}},
            "4XX": error,
            "5XX": error,
        },
    }

"""Every error as OpenAI's error object.

Knows which exception becomes which status.  No traceback reaches a client.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.protocol import RequestError, error_body, request_error

RETRY_AFTER_S = 1
"""What a client is told to wait that finds the queue full, or the server on its way out."""
INTERNAL = "the server failed to answer; its log has the reason"
_CODES = {404: "not_found", 405: "method_not_allowed"}


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Anything that msgspec can encode, as JSON."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The response that says what is wrong with a request."""
    headers = dict(headers or {})
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error_body(str(error), error.status, error.param, error.code)
    return json_response(body, error.status, headers)


@contextlib.contextmanager
def client_errors() -> Iterator[None]:
    """Inside, what a request's values can cause is the client's error and not ours.

    Raises:
        RequestError: instead of ValueError, OverflowError and RecursionError.
    """
    try:
        yield
    except ValueError as error:
        raise request_error(error) from error
    except OverflowError as error:
        raise RequestError(f"a number is out of range: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


async def on_request_error(request: Request, error: Exception) -> Response:
    """Handler of a request's own errors."""
    assert isinstance(error, RequestError)
    return error_response(error)


async def on_dead_engine(request: Request, error: Exception) -> Response:
    """Handler of the end of the engine."""
    return error_response(RequestError(str(error), None, "engine_dead", 503))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler of unknown paths and methods."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    reason = HTTPStatus(status).phrase
    message = f"{request.method} {request.url.path}: {reason}"
    wrong = RequestError(message, None, _CODES.get(status, "invalid_request"), status)
    return error_response(wrong, error.headers)


async def on_disconnect(request: Request, error: Exception) -> Response:
    """Handler of clients that leave before they have sent their body; nobody reads this."""
    return Response(status_code=400)


def bug() -> RequestError:
    """What a client is told of an error of ours; the traceback is the log's."""
    return RequestError(INTERNAL, None, "internal_error", 500)

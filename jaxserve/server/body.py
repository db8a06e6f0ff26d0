"""From an HTTP request to a checked body: media type, size, JSON.

Knows limits and complaints.  What the fields mean is `jaxserve.protocol`'s.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
from starlette.requests import Request

from jaxserve.protocol import RequestError
from jaxserve.server.config import MIB

_TYPES = ("application/json", "")


async def read_json(request: Request, max_bytes: int) -> Any:
    """The decoded body.

    Raises:
        RequestError: another media type or a compressed body (415), too large (413), or not JSON
            (400).
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _TYPES and not media_type.endswith("+json"):
        raise RequestError(
            f"content-type {media_type!r} is not supported; send application/json",
            None,
            "unsupported_media_type",
            415,
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise RequestError(
            f"content-encoding {encoding!r} is not supported; send the body as it is",
            None,
            "unsupported_media_type",
            415,
        )
    return decode_json(await read_body(request, max_bytes))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The bytes of the body, of which no more than `max_bytes` are ever held."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def decode_json(body: bytes) -> Any:
    """Decode strictly; a number that JSON or a float cannot hold is named with its field."""
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("the body is nested too deeply", None, "invalid_json") from None
    except msgspec.DecodeError as error:
        if not body.strip():
            raise RequestError("the body is empty; send a JSON object") from None
        name = _not_finite(body)
        if name is not None:
            raise RequestError(f"{name}: not a finite number", name) from None
        raise RequestError(f"the body is not valid JSON: {error}", None, "invalid_json") from None


def _not_finite(body: bytes) -> str | None:
    """The field that holds NaN or an infinity, which only Python's parser accepts."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return next((name for name, item in value.items() if _has_not_finite(item)), None)


def _has_not_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_not_finite, value.values()))
    if isinstance(value, list):
        return any(map(_has_not_finite, value))
    return isinstance(value, float) and not math.isfinite(value)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than the limit of {max_bytes / MIB:.3g} MiB; send less, or start the "
        "server with a larger --max-body-mib",
        None,
        "body_too_large",
        413,
    )

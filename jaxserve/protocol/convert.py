"""From decoded JSON to a checked request.  Does not know what the fields mean."""

from __future__ import annotations

import re
from typing import Any, Protocol, TypeVar

import msgspec

from jaxserve.protocol.errors import RequestError

Body = TypeVar("Body", bound=msgspec.Struct)


class NamesModel(Protocol):
    """A request that may say which model it wants."""

    model: str | None


def convert_body(body: Any, kind: type[Body]) -> Body:
    """Check a decoded JSON value against a request type, strictly: 1.0 and "1" are no integers.

    Raises:
        RequestError: a field is missing or has another type; `param` names it.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _with_path(error) from error


def check_model(request: NamesModel, served: tuple[str, ...]) -> None:
    """Check that the request names a model that is served; an absent name is the first one.

    Raises:
        RequestError: with code `model_not_found` and status 404.
    """
    if request.model is not None and request.model not in served:
        raise RequestError(
            f"model {request.model!r} is not served here; served: {', '.join(served)}",
            "model",
            "model_not_found",
            404,
        )


def _with_path(error: msgspec.ValidationError) -> RequestError:
    """Name the field before the complaint: msgspec writes "Expected ... - at `$.field`"."""
    complaint, _, path = str(error).partition(" - at `$")
    path = path.removesuffix("`").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", complaint)
    if missing and not path:
        return RequestError(f"{missing[1]} is missing", missing[1], "missing_required_parameter")
    name = re.match(r"\w*", path)
    param = name[0] if name and name[0] else None
    return RequestError(f"{path}: {complaint}" if path else complaint, param, "invalid_type")

"""Errors of requests, and OpenAI's error object."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams


class RequestError(ValueError):
    """A request that cannot be served as it stands.

    Attributes:
        param: the field at fault, if one is.
        code: OpenAI's short name of the error.
        status: the HTTP status that says the same.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


def request_error(error: ValueError) -> RequestError:
    """The same error with its field, where the message begins with one as SamplingParams' do."""
    if isinstance(error, RequestError):
        return error
    name = re.match(r"\w*", str(error))
    known = name is not None and name[0] in _FIELDS
    return RequestError(str(error), name[0] if name and known else None)


def failed_output(
    output: RequestOutput, blame: Callable[[ValueError], RequestError]
) -> RequestError | None:
    """Why an output is no answer, if one of its samples has failed.

    Args:
        output: of a request that has ended.
        blame: the request's own; names the field that is the cause, if one is.
    """
    if all(sample.finish_reason != "error" for sample in output.outputs):
        return None
    message = output.error or "the answer failed"
    if output.blamed is not None:
        return blame(RequestError(message, output.blamed))
    return RequestError(message, None, "server_error", 500)


_FIELDS = frozenset({"prompt", *SamplingParams.__dataclass_fields__})
"""What the engine names at the beginning of a complaint."""


def error_body(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

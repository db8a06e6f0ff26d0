"""What every request passes: the API key, the count of responses, an answer even to a bug.

A plain ASGI application around another one, so that streams are not touched.
"""

from __future__ import annotations

import logging
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.protocol import RequestError
from jaxserve.server.errors import bug, error_response
from jaxserve.server.metrics import Metrics

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
"""A client's name for its request, which every response to it repeats."""
OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/version", "/metrics", "/server_status", "/openapi.json"}
)
"""Paths that need no key: they say how the server does, and change and answer nothing."""


class Gate:
    """Refuses requests without the key, and counts responses by path and status."""

    def __init__(
        self, app: ASGIApp, api_key: str | None, metrics: Metrics, paths: frozenset[str]
    ) -> None:
        """Wrap an application.

        Args:
            app: what answers.
            api_key: the key, if one is needed.
            metrics: counts responses.
            paths: the paths that are counted by their name; all others count as one.
        """
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = _route_path(scope)
        handler = path if path in self._paths else "other"
        given = Headers(scope=scope)
        has_started = False

        async def counted(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                self._metrics.count_response(scope["method"], handler, message["status"])
                if (name := given.get(REQUEST_ID)) is not None:
                    MutableHeaders(scope=message).setdefault(REQUEST_ID, name)
            await send(message)

        if path not in OPEN_PATHS and not self._has_key(given):
            await error_response(_no_key())(scope, receive, counted)
            return
        try:
            await self._app(scope, receive, counted)
        except Exception:
            if has_started:
                raise  # there is no other way left to say it than a closed connection
            log.exception("%s %s failed", scope["method"], path)
            await error_response(bug())(scope, receive, counted)

    def _has_key(self, given: Headers) -> bool:
        if self._key is None:
            return True
        scheme, _, key = given.get("authorization", "").partition(" ")
        right = secrets.compare_digest(key.strip().encode("latin-1"), self._key)
        return right and scheme.lower() == "bearer"


def _route_path(scope: Scope) -> str:
    """The path without the prefix under which a proxy shows the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _no_key() -> RequestError:
    return RequestError(
        'this server needs an API key; send it as "Authorization: Bearer KEY"',
        None,
        "invalid_api_key",
        401,
    )

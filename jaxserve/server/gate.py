"""What every request passes: the API key, and the count of responses.

A plain ASGI application around another one, so that streams are not touched.
"""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.protocol import RequestError
from jaxserve.server.errors import error_response
from jaxserve.server.metrics import Metrics

OPEN_PATHS = frozenset(
    {"/", "/health", "/ready", "/version", "/metrics", "/server_status", "/openapi.json"}
)
"""Paths that need no key: they say how the server does, and change and answer nothing."""


class Gate:
    """Refuses requests without the key and counts the others by path and status."""

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
        self._key = None if api_key is None else f"Bearer {api_key}".encode()
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        handler = path if path in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(scope["method"], handler, message["status"])
            await send(message)

        if self._is_allowed(scope, path):
            await self._app(scope, receive, counted)
        else:
            error = RequestError(
                'this server needs an API key; send it as "Authorization: Bearer KEY"',
                None,
                "invalid_api_key",
                401,
            )
            await error_response(error)(scope, receive, counted)

    def _is_allowed(self, scope: Scope, path: str) -> bool:
        if self._key is None or path in OPEN_PATHS:
            return True
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        return secrets.compare_digest(given, self._key)

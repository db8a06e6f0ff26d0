"""`/start_profile` and `/stop_profile`: traces of the device and the host, if allowed.

Knows `jax.profiler`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.protocol import RequestError
from jaxserve.server.errors import json_response


@dataclass
class Profiler:
    """Starts and stops one trace at a time."""

    directory: str
    """Where the traces go, for TensorBoard or Perfetto."""
    _running: bool = False

    def routes(self) -> list[Route]:
        """The two endpoints."""
        return [
            Route("/start_profile", self.start, methods=["POST"]),
            Route("/stop_profile", self.stop, methods=["POST"]),
        ]

    async def start(self, request: Request) -> Response:
        """Begin a trace."""
        from jax import profiler

        if self._running:
            raise RequestError("a profile is being taken; stop it first", None, "profiling", 409)
        self._running = True
        try:
            await asyncio.to_thread(profiler.start_trace, self.directory)
        except BaseException:
            self._running = False
            raise
        return json_response({"status": "profiling", "directory": self.directory})

    async def stop(self, request: Request) -> Response:
        """End the trace and write it."""
        from jax import profiler

        if not self._running:
            raise RequestError("no profile is being taken", None, "not_profiling", 409)
        await asyncio.to_thread(profiler.stop_trace)
        self._running = False
        return json_response({"status": "stopped", "directory": self.directory})

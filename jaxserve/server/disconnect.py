"""A client that goes away ends its request.

Knows ASGI's `receive`.  One task per request watches; none is made per token.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.types import Receive

from jaxserve.server.service import Open


@contextlib.asynccontextmanager
async def aborted_on_disconnect(receive: Receive, entry: Open) -> AsyncIterator[None]:
    """Abort the request as soon as its client disconnects, while the block runs."""
    watcher = asyncio.create_task(_watch(receive, entry))
    try:
        yield
    finally:
        watcher.cancel()


async def _watch(receive: Receive, entry: Open) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    entry.abort()

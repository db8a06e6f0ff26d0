"""A server as a process: the socket, the signals and the exit code.

Knows uvicorn.  Does not know the endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
import uvloop
from starlette.applications import Starlette

from jaxserve.server.config import ServerConfig
from jaxserve.server.service import Service

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep the interpreter once the engine's thread wants it; Python's
default of 5 ms is as long as a step."""
CUT_GRACE_S = 3
"""How long cut streams may take to tell their clients so."""


def bind(config: ServerConfig) -> socket.socket:
    """Take the port, before time is spent on loading a model.

    Raises:
        ValueError: it is in use, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((config.host, config.port))
    except OSError as error:
        taken.close()
        raise ValueError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror or error}; choose "
            "another --port, or 0 for a free one"
        ) from error
    return taken


def address(listening: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: Starlette,
    config: ServerConfig,
    listening: socket.socket,
    on_ready: Callable[[str], object],
) -> bool:
    """Serve until a signal ends it; false if requests had to be cut.

    The first SIGTERM or SIGINT lets the open requests end within the configured time, and new
    ones are told to go elsewhere; the second ends all at once.

    Args:
        app: from `make_app`.
        config: the same.
        listening: from `bind`.
        on_ready: called with the URL once requests are welcome.
    """
    _raise_file_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # What has been loaded stays: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    return uvloop.run(_serve(app, config, listening, on_ready))


async def _serve(
    app: Starlette,
    config: ServerConfig,
    listening: socket.socket,
    on_ready: Callable[[str], object],
) -> bool:
    service: Service = app.state.service
    url = address(listening)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            root_path=config.root_path,
            timeout_keep_alive=config.keep_alive_s,
            timeout_graceful_shutdown=CUT_GRACE_S,
        )
    )
    shutdown = _Shutdown(service, server)
    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, shutdown.on_signal, signum)
    serving = asyncio.create_task(server.serve([listening]))
    announcing = asyncio.create_task(_announce(service, on_ready, url))
    try:
        await serving
    finally:
        announcing.cancel()
    return not service.cut


async def _announce(service: Service, on_ready: Callable[[str], object], url: str) -> None:
    await service.warm.wait()
    on_ready(url)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, which end the process by the signal itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Shutdown:
    """Drains at the first signal, stops at the second."""

    def __init__(self, service: Service, server: uvicorn.Server) -> None:
        self._service = service
        self._server = server
        self._draining: asyncio.Task[None] | None = None

    def on_signal(self, signum: signal.Signals) -> None:
        if self._draining is None:
            log.info("%s: no more requests; waiting for the open ones", signum.name)
            self._draining = asyncio.create_task(self._drain())
        else:
            log.info("%s again: stopping at once", signum.name)
            self._service.cut_now()
            self._server.should_exit = True

    async def _drain(self) -> None:
        await self._service.drain()
        self._server.should_exit = True


def _raise_file_limit() -> None:
    """Every connection is an open file: allow as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

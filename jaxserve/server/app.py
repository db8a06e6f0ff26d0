"""The application: every path, and what it is answered by.

Knows the endpoints' names.  Does not know sockets and signals (`run.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from jaxserve.async_llm import AsyncLLM, EngineDeadError
from jaxserve.protocol import RequestError
from jaxserve.server import admin, tokens
from jaxserve.server.config import ServerConfig
from jaxserve.server.errors import (
    on_dead_engine,
    on_disconnect,
    on_http_exception,
    on_request_error,
)
from jaxserve.server.gate import Gate
from jaxserve.server.generation import chat_completions, completions
from jaxserve.server.metrics import Metrics
from jaxserve.server.openapi import openapi
from jaxserve.server.profiler import Profiler
from jaxserve.server.service import Service

if TYPE_CHECKING:
    from jaxserve.protocol.answer_format import AnswerFormat

_GET = ["GET"]
_POST = ["POST"]


def make_app(
    llm: AsyncLLM,
    config: ServerConfig,
    metrics: Metrics,
    answer_format: AnswerFormat | None = None,
) -> Starlette:
    """The ASGI application; its lifespan starts the engine, warms up and closes the model.

    Args:
        llm: the model.
        config: the server's own configuration.
        metrics: becomes the engine's observer once the server is warm.
        answer_format: how the model writes reasoning and tool calls; None for plain text.
    """
    service = Service(llm, config, metrics, answer_format)
    routes = _routes()
    if config.profiler_dir is not None:
        routes += Profiler(config.profiler_dir).routes()
    known = frozenset(route.path for route in routes)
    app = Starlette(
        routes=routes,
        middleware=[
            *_cors(config.allowed_origins),
            Middleware(Gate, api_key=config.api_key, metrics=metrics, paths=known),
        ],
        exception_handlers={
            HTTPException: on_http_exception,
            RequestError: on_request_error,
            EngineDeadError: on_dead_engine,
            ClientDisconnect: on_disconnect,
        },
        lifespan=_lifespan,
    )
    app.state.service = service
    return app


def _routes() -> list[Route]:
    return [
        Route("/v1/completions", completions, methods=_POST),
        Route("/v1/chat/completions", chat_completions, methods=_POST),
        Route("/v1/models", admin.models, methods=_GET),
        Route("/v1/models/{model:path}", admin.model, methods=_GET),
        Route("/tokenize", tokens.tokenize, methods=_POST),
        Route("/detokenize", tokens.detokenize, methods=_POST),
        Route("/tokenizer_info", tokens.tokenizer_info, methods=_GET),
        Route("/abort_request", admin.abort_request, methods=_POST),
        Route("/health", admin.health, methods=_GET),
        Route("/ready", admin.ready, methods=_GET),
        Route("/version", admin.version, methods=_GET),
        Route("/server_info", admin.server_info, methods=_GET),
        Route("/server_status", admin.server_status, methods=_GET),
        Route("/metrics", admin.metrics, methods=_GET),
        Route("/openapi.json", openapi, methods=_GET),
        Route("/", admin.status_page, methods=_GET),
    ]


def _cors(origins: tuple[str, ...]) -> list[Middleware]:
    """What lets pages of these origins ask; around the gate, as a browser's preflight has no key.

    A page must send the key itself, in its header: a browser adds no credentials of its own.
    """
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=[*_GET, *_POST],
            allow_headers=["*"],  # clients of OpenAI's API send a dozen of their own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    ]


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    service: Service = app.state.service
    service.metrics.watch(service.llm.engine)
    service.llm.start()
    warming = asyncio.create_task(service.warm_up())
    try:
        yield
    finally:
        await warming
        await service.llm.close()

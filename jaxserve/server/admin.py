"""The endpoints beside inference: models, health, metrics, status, aborting.

Knows what operators and their tools ask for.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

import jaxserve
from jaxserve.protocol import RequestError, convert_body
from jaxserve.server.body import read_json
from jaxserve.server.errors import error_response, json_response
from jaxserve.server.service import Service

STATUS_PAGE = Path(__file__).parent / "static" / "index.html"


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of `/abort_request`."""

    request_id: str
    """The id of a response, or what the client gave as X-Request-Id."""


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxserve",
        "root": service.llm.config.model or service.llm.model_name,
        "parent": None,
        "max_model_len": service.max_model_len,
    }


async def models(request: Request) -> Response:
    """The served names of the model."""
    service = _service(request)
    cards = [_card(service, name) for name in service.names]
    return json_response({"object": "list", "data": cards})


async def model(request: Request) -> Response:
    """One served name."""
    service, name = _service(request), request.path_params["model"]
    if name not in service.names:
        served = ", ".join(service.names)
        message = f"model {name!r} is not served here; served: {served}"
        raise RequestError(message, "model", "model_not_found", 404)
    return json_response(_card(service, name))


async def health(request: Request) -> Response:
    """200 while the process can serve; 503 once its engine has failed."""
    service = _service(request)
    if service.llm.is_alive:
        return json_response({"status": "ok"})
    return error_response(RequestError(_why_dead(service), None, "engine_dead", 503))


async def ready(request: Request) -> Response:
    """200 while new requests are welcome: after the warm-up, and until the shutdown begins."""
    service = _service(request)
    if service.is_ready:
        return json_response({"status": "ready"})
    if not service.llm.is_alive:
        return error_response(RequestError(_why_dead(service), None, "engine_dead", 503))
    state = "shutting down" if service.draining else "warming up"
    return error_response(RequestError(f"the server is {state}", None, "not_ready", 503))


def _why_dead(service: Service) -> str:
    error = service.llm.error
    return f"the engine has failed: {type(error).__name__}" if error else "the engine was closed"


async def version(request: Request) -> Response:
    """The version of this package."""
    return json_response({"version": jaxserve.__version__})


async def server_info(request: Request) -> Response:
    """The configuration, and what was allocated and compiled."""
    service = _service(request)
    server = dataclasses.asdict(service.config)
    del server["api_key"]
    return json_response(
        {
            "version": jaxserve.__version__,
            "model": service.names[0],
            "engine_config": dataclasses.asdict(service.llm.config),
            "server_config": server,
            "engine": await service.llm.call(lambda engine: engine.describe()),
        }
    )


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    counts = _service(request).metrics
    return Response(counts.exposition(), headers={"content-type": counts.content_type})


async def server_status(request: Request) -> Response:
    """The figures of the status page."""
    service = _service(request)
    snapshot = service.metrics.snapshot()
    state = "ready" if service.is_ready else "draining" if service.draining else "starting"
    return json_response({**snapshot, "state": state if service.llm.is_alive else "failed"})


async def status_page(request: Request) -> Response:
    """The page that shows them."""
    return FileResponse(STATUS_PAGE, media_type="text/html")


async def abort_request(request: Request) -> Response:
    """End requests by their id or by the client's name; ids that are not open are no error."""
    service = _service(request)
    asked = convert_body(await read_json(request, service.config.max_body_bytes), AbortRequest)
    return json_response({"aborted": service.abort(asked.request_id)})

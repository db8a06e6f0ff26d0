"""A server of OpenAI's two endpoints with no model: its answers are a function of the body.

For clients that must work with any server; it can be told to refuse or to fail.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def text_of(body: dict[str, Any]) -> str:
    """What the stub answers: one letter per token."""
    asked = body.get("prompt") or body["messages"][-1]["content"]
    limit = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    return chr(ord("a") + len(str(asked)) % 26) * limit


def num_prompt_tokens(body: dict[str, Any]) -> int:
    """A token per id or word."""
    asked = body.get("prompt") or body["messages"][-1]["content"]
    return len(asked.split() if isinstance(asked, str) else asked)


def error(status: int, message: str = "no", **headers: str) -> Response:
    """An answer with OpenAI's form of an error."""
    content = {"error": {"message": message, "type": "x", "param": None, "code": "no"}}
    return JSONResponse(content, status, headers=headers)


@dataclass
class Stub:
    """A running stub; `with Stub() as stub: stub.url`."""

    vocab_size: int | None = None
    """Told at /tokenizer_info, which is not there otherwise."""
    tokens_per_chunk: int = 1
    with_usage: bool = True
    hold: int = 0
    """Nobody is answered before so many have asked at once, for a while."""
    intercept: Callable[[int, dict[str, Any]], Response | None] = lambda number, body: None
    """Answers the request of that number instead, if it gives an answer."""
    tail: Callable[[dict[str, Any]], list[bytes]] = lambda body: [b"data: [DONE]\n\n"]
    """The end of a stream."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    def __enter__(self) -> Stub:
        app = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/tokenizer_info", self._tokenizer_info),
                Route("/v1/completions", self._answer, methods=["POST"]),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
            ]
        )
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Go away at once."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def _tokenizer_info(self, request: Request) -> Response:
        if self.vocab_size is None:
            return error(404)
        return JSONResponse({"vocab_size": self.vocab_size})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.url.path)
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await self._hold()
            instead = self.intercept(number, body)
        finally:
            self._now -= 1
        if instead is not None:
            return instead
        is_chat = request.url.path.endswith("/chat/completions")
        if body.get("stream"):
            return StreamingResponse(self._stream(body, is_chat), media_type="text/event-stream")
        return JSONResponse(self._whole(body, is_chat))

    async def _hold(self) -> None:
        for _ in range(1000):
            if self.most_at_once >= self.hold:
                return
            await asyncio.sleep(0.01)

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt, output = num_prompt_tokens(body), len(text_of(body))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    def _whole(self, body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
        message = {"role": "assistant", "content": text_of(body)}
        said = {"message": message} if is_chat else {"text": text_of(body)}
        return {
            "id": f"answer-{len(self.bodies)}",
            "model": body.get("model"),
            "choices": [{"index": 0, **said, "finish_reason": "length"}],
            "usage": self._usage(body),
        }

    async def _stream(self, body: dict[str, Any], is_chat: bool) -> AsyncIterator[bytes]:
        text, size = text_of(body), self.tokens_per_chunk
        if is_chat:
            yield _event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for first in range(0, len(text), size):
            piece = text[first : first + size]
            said = {"delta": {"content": piece}} if is_chat else {"text": piece}
            # In two pieces, as a network may cut it.
            event = _event(choices=[{"index": 0, **said}])
            yield event[:9]
            yield event[9:]
        if self.with_usage and body.get("stream_options", {}).get("include_usage"):
            yield _event(choices=[], usage=self._usage(body))
        for piece in self.tail(body):
            yield piece


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"

"""One request to an OpenAI server, and when its parts came.

Knows HTTP, server-sent events and the two endpoints.  Does not know why it asks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, fields
from typing import Any

import httpx
import msgspec

from jaxserve.remote import error_text, reason

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REFUSALS = (429, 503)
"""Statuses by which a server says that it has too much to do."""


@dataclass(slots=True)
class Answered:
    """What became of one request; seconds are counted from the start of the run."""

    start_s: float
    late_s: float = 0.0
    """How much later it was sent than it was due."""
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """Between one chunk with text and the next; a chunk may hold several tokens."""
    e2e_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    status: int | None = None
    error: str | None = None
    """Why there is no whole answer."""

    @property
    def is_refused(self) -> bool:
        """The server had too much to do."""
        return self.status in REFUSALS

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first."""
        if self.ttft_s is None or self.e2e_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    def to_dict(self) -> dict[str, Any]:
        """All of it, for the file of results."""
        names = (one.name for one in fields(self))
        return {**{name: getattr(self, name) for name in names}, "tpot_s": self.tpot_s}


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        """It brings text, or says that there is no more, as for an answer that is empty."""
        delta = self.delta or _Delta()
        said = self.text or delta.content or delta.reasoning or delta.reasoning_content
        return bool(said or delta.tool_calls or self.finish_reason)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


class Asker:
    """Asks one server, and keeps times."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        model: str,
        endpoint: str = "completions",
        extra_body: dict[str, Any] | None = None,
    ) -> None:
        """Count seconds from now.

        Args:
            client: with the base URL and the headers of the server.
            model: the name it knows.
            endpoint: a key of PATHS.
            extra_body: further fields of every body.
        """
        self._client = client
        self._path = PATHS[endpoint]
        self._always = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(extra_body or {}),
        }
        self.begin()

    def begin(self) -> None:
        """Count seconds from now on."""
        self._begin = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._begin

    async def ask(self, body: dict[str, Any], due_s: float | None = None) -> Answered:
        """Send a request and read its answer to the end; what fails is in the answer.

        Args:
            body: prompt and lengths.
            due_s: when it was to be sent; times count from then.
        """
        now_s = self.now_s
        start_s = now_s if due_s is None else due_s
        answered = Answered(start_s, now_s - start_s)
        try:
            async with self._client.stream("POST", self._path, json=self._always | body) as reply:
                answered.status = reply.status_code
                if reply.status_code != 200:
                    answered.error = error_text(reply.status_code, await reply.aread())
                else:
                    await self._read(reply, answered)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            answered.error = reason(error)
        return answered

    async def _read(self, reply: httpx.Response, answered: Answered) -> None:
        last_s, num_chunks, usage, is_done = 0.0, 0, None, False
        async for data in events(reply):
            if data == b"[DONE]":
                is_done = True
                continue
            chunk = _CHUNKS.decode(data)
            usage = chunk.usage or usage
            if chunk.error is not None:
                answered.error = _message(chunk.error)
            if any(choice.has_output for choice in chunk.choices):
                now_s = self.now_s - answered.start_s
                if answered.ttft_s is None:
                    answered.ttft_s = now_s
                else:
                    answered.gaps_s.append(now_s - last_s)
                last_s, num_chunks = now_s, num_chunks + 1
        if num_chunks:
            answered.e2e_s = last_s
        self._count(answered, usage, num_chunks)
        if answered.error is None and not (is_done and num_chunks):
            answered.error = "the stream ended early"

    @staticmethod
    def _count(answered: Answered, usage: _Usage | None, num_chunks: int) -> None:
        """A server that sends no usage is taken to send a token per chunk."""
        if usage is None:
            answered.output_tokens = num_chunks
            return
        answered.prompt_tokens = usage.prompt_tokens
        answered.output_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details or _Details()
        answered.cached_tokens = details.cached_tokens or 0


async def events(reply: httpx.Response) -> AsyncIterator[bytes]:
    """The data of server-sent events, as far as OpenAI's streams use them: one line each."""
    rest = b""
    async for piece in reply.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if rest.startswith(b"data:"):
        yield rest[5:].strip()


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(error if message is None else message)

"""Server-sent events: one write for what one step gave.

Knows the framing and when a stream ends.  Which chunks there are is `jaxserve.protocol`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from jaxserve.outputs import Delta
from jaxserve.protocol import RequestError, error_body
from jaxserve.server.disconnect import aborted_on_disconnect
from jaxserve.server.errors import bug
from jaxserve.server.service import Open, Service

log = logging.getLogger(__name__)

_ENCODER = msgspec.json.Encoder()
_DONE = b"data: [DONE]\n\n"


def frame(chunks: Iterable[Any]) -> bytes:
    """Chunks as events."""
    encoded = bytearray()
    for chunk in chunks:
        encoded += b"data: "
        _ENCODER.encode_into(chunk, encoded, -1)
        encoded += b"\n\n"
    return bytes(encoded)


class EventStream:
    """The response to a streamed request.

    What comes while a write waits for a slow client is merged by the answers, so that a stream
    never holds more than one chunk of each sample.
    """

    def __init__(
        self, service: Service, entry: Open, streamed: Any, headers: Mapping[str, str]
    ) -> None:
        """Prepare; nothing is sent before the response is called.

        Args:
            service: closes the entry at the end.
            entry: the request, with its answers.
            streamed: makes the chunks, a `StreamedAnswer`.
            headers: of the response.
        """
        self._service = service
        self._entry = entry
        self._streamed = streamed
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream."""
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            # Proxies such as nginx would collect the events otherwise.
            "x-accel-buffering": "no",
            **self._headers,
        }
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        try:
            async with aborted_on_disconnect(receive, self._entry):
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                await self._send_events(send)
        finally:
            self._service.close(self._entry)

    async def _send_events(self, send: Send) -> None:
        try:
            last = await self._send_until_the_end(send)
        except Exception:  # a bug, but the client must not wait for what will not come
            log.exception("the stream of %s failed", self._entry.response_id)
            last = _error_frame(bug())
        await send({"type": "http.response.body", "body": last + _DONE, "more_body": False})

    async def _send_until_the_end(self, send: Send) -> bytes:
        """Send all events but the last ones, which are returned."""
        answers, changed = self._entry.answers, self._entry.answers[0].changed
        body = frame(self._streamed.start())
        while True:
            changed.clear()
            is_last = all(answer.ended for answer in answers)
            deltas = [(i, delta) for i, answer in enumerate(answers) for delta in answer.take()]
            good = [(i, delta) for i, delta in deltas if not self._has_failed(delta)]
            chunks = []
            for index, delta in good:
                chunks += self._streamed.push(index, delta, answers[index].prompt_logprobs)
            body += frame(chunks)
            if len(good) < len(deltas):
                return body + _error_frame(await self._failure())
            if is_last:
                return body + frame(self._streamed.end([await a.result() for a in answers]))
            if chunks:  # what `start` gave goes out with the first token, as clients time it
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b""
            await changed.wait()

    def _has_failed(self, delta: Delta) -> bool:
        """The sample has ended in a way that is no answer."""
        reason = delta.finish_reason
        return reason == "error" or (reason == "abort" and self._service.cut)

    async def _failure(self) -> RequestError:
        """End the request as a whole, and say why."""
        self._entry.abort()
        for answer in self._entry.answers:
            await answer.result()
        failure = self._service.failure(self._entry)
        assert failure is not None
        return failure


def _error_frame(error: RequestError) -> bytes:
    return frame([error_body(str(error), error.status, error.param, error.code)])

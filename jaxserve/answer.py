"""The answer to one request as an asyncio program reads it.

Knows how deltas wait for a slow reader.  Does not know the engine: whoever made the answer feeds
it and is told when it is to be aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxserve.outputs import Delta, Logprob, RequestOutput

PromptLogprobs = list[dict[int, Logprob] | None]
"""One entry per prompt token, as in `RequestOutput`."""


@dataclass(slots=True)
class _Merged:
    """The deltas of one sample that nobody has read yet."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        self.last = delta

    def delta(self) -> Delta:
        assert self.last is not None
        if len(self.text) == 1:
            return self.last
        return Delta(
            request_id=self.last.request_id,
            index=self.last.index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.last.finish_reason,
            stop_reason=self.last.stop_reason,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
        )


class Answer:
    """An async iterator of the deltas of one request, and its result at the end.

    What a slow reader has not fetched is merged per sample: at most one delta of each sample
    waits, and nothing is lost.  Leave it early with `abort`, `aclose` or `async with`.
    """

    def __init__(
        self, request_id: str, changed: asyncio.Event, on_abort: Callable[[str], None]
    ) -> None:
        """Begin without deltas.

        Args:
            request_id: of the engine's request.
            changed: set whenever there is something new; several answers may share one.
            on_abort: called at most once with the id, if the reader leaves before the end.
        """
        self.request_id = request_id
        self.changed = changed
        self.prompt_logprobs: PromptLogprobs | None = None
        """Of an echoed prompt, complete with the first delta."""
        self._on_abort = on_abort
        self._waiting: dict[int, _Merged] = {}
        self._ended: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._aborted = False

    @property
    def ended(self) -> bool:
        """The last delta was given; it may still wait to be read."""
        return self._ended.done()

    @property
    def output(self) -> RequestOutput | None:
        """The result, once there is one."""
        return self._ended.result() if self.ended else None

    def take(self) -> list[Delta]:
        """What has come since the last call, one delta for each sample that has any."""
        waiting, self._waiting = self._waiting, {}
        return [merged.delta() for merged in waiting.values()]

    async def result(self) -> RequestOutput:
        """Wait for the end of all samples."""
        return await asyncio.shield(self._ended)

    def abort(self) -> None:
        """End the request now, unless it has ended; what it has can still be read."""
        if not self.ended and not self._aborted:
            self._aborted = True
            self._on_abort(self.request_id)

    async def aclose(self) -> None:
        """Abort, as leaving an `async with` does."""
        self.abort()

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Delta:
        while not self._waiting:
            if self.ended:
                raise StopAsyncIteration
            self.changed.clear()
            await self.changed.wait()
        index = next(iter(self._waiting))
        return self._waiting.pop(index).delta()

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.abort()

    def feed(self, delta: Delta) -> None:
        """Called by the maker: a sample has something new."""
        merged = self._waiting.get(delta.index)
        if merged is None:
            merged = self._waiting[delta.index] = _Merged()
        merged.add(delta)
        self.changed.set()

    def end(self, output: RequestOutput) -> None:
        """Called by the maker: all samples have ended."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._ended.done():
            self._ended.set_result(output)
        self.changed.set()

    def expire_after(self, seconds: float, on_deadline: Callable[[str], None]) -> None:
        """Called by the maker: have `on_deadline` called with the id unless it ends before."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(seconds, 0.0), on_deadline, self.request_id)

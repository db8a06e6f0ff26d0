"""What all endpoints share: the model, who may ask now, and which requests are open.

Knows the server's three states, warming up, ready and draining.  Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.answer import Answer
from jaxserve.async_llm import AsyncLLM
from jaxserve.protocol import RequestError, failed_output
from jaxserve.server.config import ServerConfig

if TYPE_CHECKING:
    from jaxserve.protocol.answer_format import AnswerFormat
    from jaxserve.server.metrics import Metrics

log = logging.getLogger(__name__)

SHUTDOWN = "the server is shutting down and had to end this request"


@dataclass(eq=False)
class Open:
    """A request that is being answered."""

    response_id: str
    name: str | None
    """What the client calls it, if anything."""
    blame: Callable[[ValueError], RequestError]
    """Names the request's own field in a complaint about a parameter."""
    answers: list[Answer] = field(default_factory=list)
    _aborted: bool = False

    def begin(self, answers: list[Answer]) -> None:
        """It was submitted; if it was to be ended before that, it is now."""
        self.answers = answers
        if self._aborted:
            self.abort()

    def abort(self) -> None:
        """End it; its answers get the reason "abort"."""
        self._aborted = True
        for answer in self.answers:
            answer.abort()


class Service:
    """The state behind the endpoints."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig,
        metrics: Metrics,
        answer_format: AnswerFormat | None = None,
    ) -> None:
        """Begin in the state of warming up.

        Args:
            llm: the model.
            config: the server's own configuration.
            metrics: counts, for /metrics and the status page.
            answer_format: how the model writes reasoning and tool calls; None for plain text.
        """
        self.llm = llm
        self.config = config
        self.metrics = metrics
        self.answer_format = answer_format
        self.names = config.served_model_name or (llm.model_name,)
        self.created = int(time.time())
        self.warm = asyncio.Event()
        self.draining = False
        self.cut = False
        """Requests that were still open have been ended."""
        self._open: dict[str, Open] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        assert self.llm.config.max_model_len is not None
        return self.llm.config.max_model_len

    @property
    def is_ready(self) -> bool:
        """New requests are welcome."""
        return self.warm.is_set() and not self.draining and self.llm.is_alive

    def check_admission(self, num_samples: int = 0) -> None:
        """Check that there is room for a request.

        Raises:
            RequestError: draining or dead (503), the queue is full (429), or the request alone
                has more samples than may ever wait (400).
        """
        if self.draining:
            raise RequestError("the server is shutting down", None, "shutting_down", 503)
        limit = self.config.max_queue
        if num_samples > limit:
            raise RequestError(
                f"the request has {num_samples} samples (prompts times n); at most {limit} may "
                "wait here, so send it in parts"
            )
        waiting = self.llm.num_waiting
        if waiting >= limit:
            raise RequestError(
                f"{waiting} samples wait already and max_queue is {limit}; come back later",
                None,
                "queue_full",
                429,
            )

    def open(
        self, response_id: str, name: str | None, blame: Callable[[ValueError], RequestError]
    ) -> Open:
        """Register a request, so that it can be aborted by name and the server waits for it."""
        entry = self._open[response_id] = Open(response_id, name, blame)
        self._idle.clear()
        return entry

    def close(self, entry: Open) -> None:
        """The request was answered, or its client has gone: nothing of it goes on."""
        entry.abort()
        self._open.pop(entry.response_id, None)
        if not self._open:
            self._idle.set()

    def abort(self, name: str) -> int:
        """Abort the open requests with this id, ours or the client's; how many there are."""
        found = [entry for entry in self._open.values() if name in (entry.response_id, entry.name)]
        for entry in found:
            entry.abort()
        return len(found)

    def failure(self, entry: Open) -> RequestError | None:
        """Why the answers of a request, having ended, cannot be given as such, if that is so."""
        for answer in entry.answers:
            output = answer.output
            if output is None:
                continue
            if (error := failed_output(output, entry.blame)) is not None:
                return error
            if self.cut and any(sample.finish_reason == "abort" for sample in output.outputs):
                return RequestError(SHUTDOWN, None, "shutting_down", 503)
        return None

    async def warm_up(self) -> None:
        """Have done what would make the first request slow, and be ready."""
        if self.llm.config.warm_up and self.llm.config.masked_steps != "off":
            await asyncio.to_thread(self.llm.engine.grammars.load)
        if self.llm.config.warm_up and self.llm.tokenizer.chat_template is not None:
            try:
                await asyncio.to_thread(
                    self.llm.tokenizer.encode_chat, [{"role": "user", "content": "hello"}]
                )
            except ValueError as error:
                log.warning("%s", error)
        self.warm.set()

    async def drain(self) -> None:
        """Take no more requests; wait for the open ones, and cut those that take too long."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.config.drain_timeout_s)
        except TimeoutError:
            self.cut_now()

    def cut_now(self) -> None:
        """End all open requests with an error."""
        self.draining = True
        if self._open:
            log.warning("%d requests had to be cut", len(self._open))
            self.cut = True
        for entry in list(self._open.values()):
            entry.abort()

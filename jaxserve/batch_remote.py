"""Answer the lines of a batch file with a running server, a bounded number of them at a time.

Knows how a line becomes a request over HTTP, and when to ask again.  Does not know which lines are
pending (`batch_file.py`), or the command line.

A line that the server cannot answer costs a record.  A server that is gone ends the run instead, so
that the lines without an answer are not taken for failed ones.  Which of the two it is where an
answer breaks off again and again, another question tells.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from jaxserve.batch_file import BatchJob, Line
from jaxserve.batch_writer import BatchReport, BatchWriter
from jaxserve.protocol import RequestError
from jaxserve.remote import CONNECT_TIMEOUT_S, RemoteServer, error_object, error_text, reason

log = logging.getLogger(__name__)

REFUSALS = (429, 503)
"""Statuses by which a server says that it has too much to do."""
BREAKS = (502, 504)
"""Statuses by which a proxy says that the server behind it gave no answer."""
LONGEST_PAUSE_S = 30.0
_LOOK_S = 0.1
"""Between two looks at whether the run is to stop."""


class ServerLost(ValueError):
    """The server has not answered for so long that the run makes no sense."""


class _Broken(Exception):
    """A server that is there does not answer a line."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a line is asked again, in seconds."""

    refused_s: float = 600.0
    """While the server says that it has too much to do, and answers no other line either."""
    silent_s: float = 20.0
    """While its answer does not come, or breaks off."""
    first_pause_s: float = 0.5
    """Doubled from one pause to the next, where the server does not name it (Retry-After)."""

    def pause_s(self, attempt: int, named_s: float | None) -> float:
        """Seconds before the next attempt, spread so that not all lines come back at once."""
        if named_s is not None:
            return min(max(named_s, 0.0), LONGEST_PAUSE_S)
        pause_s = min(self.first_pause_s * float(2 ** min(attempt, 16)), LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.5, 1.0)


def run_remote(
    job: BatchJob,
    server: RemoteServer,
    *,
    concurrency: int,
    patience: Patience | None = None,
    on_record: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> BatchReport:
    """Have every pending line of `job` answered.

    Args:
        job: an opened job; lines that name no model ask for its.
        server: who answers.
        concurrency: most requests at once.
        patience: when to give up.
        on_record: called after each record written.
        should_stop: asked now and then; true ends the run early, leaving a resumable file.
        clock: the time in seconds, for the patience.

    Raises:
        ServerLost: the server is gone, or refuses for too long; the file is resumable.
        OSError: the output cannot be written.
    """
    with job.start() as output:
        writer = BatchWriter(output, on_record)
        for line, error in job.failures():
            writer.fail(line, error)
        if any(line.is_valid for line in job.lines):
            run = _Run(job, server, writer, patience or Patience(), clock)
            writer.report.interrupted = asyncio.run(run.answer(concurrency, should_stop))
        return writer.report


class _Run:
    """Workers that share the pending lines."""

    def __init__(
        self,
        job: BatchJob,
        server: RemoteServer,
        writer: BatchWriter,
        patience: Patience,
        clock: Callable[[], float],
    ) -> None:
        self._job = job
        self._server = server
        self._writer = writer
        self._patience = patience
        self._clock = clock
        self._heard = clock()

    async def answer(self, concurrency: int, should_stop: Callable[[], bool]) -> bool:
        """Ask until all lines have a record; true if stopped before that."""
        lines = _bodies(self._job)
        async with self._server.client() as client:
            workers = [asyncio.create_task(self._work(client, lines)) for _ in range(concurrency)]
            async with _cancelled_at_the_end(workers):
                while True:
                    done, left = await asyncio.wait(
                        workers, timeout=_LOOK_S, return_when=asyncio.FIRST_EXCEPTION
                    )
                    for worker in done:
                        worker.result()  # raises what it raised
                    if not left:
                        return False
                    if should_stop():
                        return True

    async def _work(
        self, client: httpx.AsyncClient, lines: Iterator[tuple[Line, str, dict[str, Any]]]
    ) -> None:
        for line, path, body in lines:
            try:
                reply = await self._ask(client, path, body)
            except _Broken as error:
                self._writer.fail(line, RequestError(str(error), None, "connection_error", 502))
            else:
                self._record(line, reply)

    async def _ask(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any]
    ) -> httpx.Response:
        """Ask, and ask again while that may help.

        Raises:
            ServerLost: it refuses for too long, or is gone.
            _Broken: it is there, but does not answer this.
        """
        begin, attempt = self._clock(), 0
        while True:
            named_s = None
            try:
                reply = await client.post(path, json=body)
            except httpx.TransportError as error:
                complaint, is_refusal = reason(error), False
            else:
                if reply.status_code not in REFUSALS + BREAKS and not _is_cut_off(reply):
                    self._heard = self._clock()
                    return reply
                complaint = error_text(reply.status_code, reply.content)
                is_refusal = reply.status_code in REFUSALS
                named_s = _retry_after_s(reply)
            log.debug("asked in vain: %s", complaint)
            await self._check_patience(client, begin, complaint, is_refusal=is_refusal)
            await asyncio.sleep(self._patience.pause_s(attempt, named_s))
            attempt += 1

    async def _check_patience(
        self, client: httpx.AsyncClient, begin: float, complaint: str, *, is_refusal: bool
    ) -> None:
        """Give up a line, or the server, where waiting has taken too long."""
        since = max(begin, self._heard) if is_refusal else begin
        waited_s = self._clock() - since
        if waited_s < (self._patience.refused_s if is_refusal else self._patience.silent_s):
            return
        if not is_refusal and await _is_there(client):
            raise _Broken(f"no answer within {waited_s:.0f} s: {complaint}")
        raise ServerLost(
            f"the server at {self._server.base_url} has answered nothing for {waited_s:.0f} s "
            f"({complaint}); continue with --resume"
        )

    def _record(self, line: Line, reply: httpx.Response) -> None:
        if reply.status_code != 200:
            error = error_object(reply.content)
            code = error.get("code") or "invalid_value"
            self._fail(line, error["message"], error.get("param"), str(code), reply.status_code)
            return
        try:
            self._writer.answer(line, msgspec.json.decode(reply.content, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            self._fail(
                line, f"the server's answer is no JSON object: {error}", None, "server_error", 502
            )

    def _fail(self, line: Line, message: str, param: str | None, code: str, status: int) -> None:
        self._writer.fail(line, RequestError(message, param, code, status))


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)


def _is_cut_off(reply: httpx.Response) -> bool:
    """An answer that the server ended early, as some do when they shut down, is none."""
    if reply.status_code != 200 or b'"abort"' not in reply.content:
        return False
    try:
        choices = msgspec.json.decode(reply.content, type=_Choices).choices
    except msgspec.DecodeError:
        return False
    return any(choice.finish_reason == "abort" for choice in choices)


async def _is_there(client: httpx.AsyncClient) -> bool:
    """Whatever it says, as long as it is not a proxy that says it."""
    try:
        reply = await client.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
    except httpx.TransportError:
        return False
    return reply.status_code not in BREAKS


@asynccontextmanager
async def _cancelled_at_the_end(tasks: list[asyncio.Task[None]]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _AnyLine(msgspec.Struct):
    """What a line that was checked before has."""

    url: str
    body: dict[str, Any]


def _bodies(job: BatchJob) -> Iterator[tuple[Line, str, dict[str, Any]]]:
    """The pending lines that can be asked: path and body as they are in the file."""
    with job.input_path.open("rb") as file:
        for line in job.lines:
            if line.is_valid:
                file.seek(line.offset)
                found = msgspec.json.decode(file.read(line.size), type=_AnyLine)
                model = found.body.get("model") or job.model
                yield line, found.url, found.body | {"model": model}


def _retry_after_s(reply: httpx.Response) -> float | None:
    """The header in seconds; its other form, a date, is left to the doubling."""
    try:
        return float(reply.headers["retry-after"])
    except (KeyError, ValueError):
        return None

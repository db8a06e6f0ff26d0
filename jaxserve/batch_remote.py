"""Answer the lines of a batch file with a running server, a bounded number of them at a time.

Knows how a line becomes a request over HTTP, and when to ask again.  Does not know which lines are
pending (`batch_file.py`), or the command line.

A line that the server cannot answer costs a record.  A server that is gone ends the run instead, so
that the lines without an answer are not taken for failed ones.
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
from jaxserve.remote import RemoteServer, error_object, error_text, reason

log = logging.getLogger(__name__)

REFUSALS = (429, 502, 503, 504)
"""Statuses after which the same request may well be answered later."""
LONGEST_PAUSE_S = 30.0
_LOOK_S = 0.1
"""Between two looks at whether the run is to stop."""


class ServerLost(ValueError):
    """The server has not answered for so long that the run makes no sense."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a line is asked again, in seconds."""

    refused_s: float = 600.0
    """While the server says that it has too much to do."""
    silent_s: float = 20.0
    """While nothing answers."""
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
) -> BatchReport:
    """Have every pending line of `job` answered.

    Args:
        job: an opened job; lines that name no model ask for its.
        server: who answers.
        concurrency: most requests at once.
        patience: when to give up.
        on_record: called after each record written.
        should_stop: asked now and then; true ends the run early, leaving a resumable file.

    Raises:
        ServerLost: the server is gone, or refuses for too long; the file is resumable.
        OSError: the output cannot be written.
    """
    with job.start() as output:
        writer = BatchWriter(output, on_record)
        for line, error in job.failures():
            writer.fail(line, error)
        if any(line.is_valid for line in job.lines):
            run = _Run(job, server, writer, patience or Patience())
            writer.report.interrupted = asyncio.run(run.answer(concurrency, should_stop))
        return writer.report


class _Run:
    """Workers that share the pending lines."""

    def __init__(
        self, job: BatchJob, server: RemoteServer, writer: BatchWriter, patience: Patience
    ) -> None:
        self._job = job
        self._server = server
        self._writer = writer
        self._patience = patience

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
            reply = await self._ask(client, path, body)
            self._record(line, reply)

    async def _ask(
        self, client: httpx.AsyncClient, path: str, body: dict[str, Any]
    ) -> httpx.Response:
        """Ask, and ask again while that may help."""
        begin = time.monotonic()
        attempt = 0
        while True:
            named_s = None
            try:
                reply = await client.post(path, json=body)
                if reply.status_code not in REFUSALS:
                    return reply
                complaint = error_text(reply.status_code, reply.content)
                most_s, named_s = self._patience.refused_s, _retry_after_s(reply)
            except httpx.TransportError as error:
                complaint, most_s = reason(error), self._patience.silent_s
            waited_s = time.monotonic() - begin
            if waited_s >= most_s:
                raise ServerLost(
                    f"the server at {self._server.base_url} has not answered a line for "
                    f"{waited_s:.0f} s ({complaint}); continue with --resume"
                )
            log.debug("asking again: %s", complaint)
            await asyncio.sleep(self._patience.pause_s(attempt, named_s))
            attempt += 1

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

"""Load on a server over HTTP, and its figures: open loop at a rate, or closed loop of users.

Works against any server of OpenAI's completions or chat completions.  Does not know the command
line.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from jaxserve.bench.serve_client import Answered, Asker
from jaxserve.bench.serve_data import Ask
from jaxserve.remote import RemoteServer, first_model, reason
from scheduler.summary import Bounds, cost_per_million_tokens, goodput, over, spread
from scheduler.trace import fixed, gamma

Progress = Callable[[], object]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests arrive at a rate, whatever becomes of those before."""

    request_rate: float
    """Mean arrivals per second."""
    burstiness: float = 1.0
    """Shape of the Gamma distribution of the gaps: 1 is Poisson, below it requests come in bursts,
    above it more evenly."""

    @property
    def words(self) -> str:
        """In the table of results."""
        return f"{self.request_rate:g}/s"

    @property
    def key(self) -> dict[str, float]:
        """What tells the row of this load from others."""
        return {"request_rate": self.request_rate}

    def due_s(self, count: int, seed: int) -> list[float]:
        """When each request is due."""
        if not self.burstiness > 0:
            raise ValueError(f"burstiness={self.burstiness} must be above 0")
        cv, one = self.burstiness**-0.5, fixed(1)
        arrivals = gamma(count, self.request_rate, cv=cv, prompt=one, output=one, seed=seed)
        return [arrival.time_s for arrival in arrivals]

    async def run(
        self, asker: Asker, bodies: Sequence[dict[str, Any]], seed: int, on_answer: Progress
    ) -> list[Answered]:
        """Send each body when it is due."""

        async def ask(body: dict[str, Any], due_s: float) -> Answered:
            answered = await asker.ask(body, due_s)
            on_answer()
            return answered

        async with asyncio.TaskGroup() as group:
            asker.begin()
            tasks = []
            for body, due_s in zip(bodies, self.due_s(len(bodies), seed), strict=True):
                await asyncio.sleep(max(due_s - asker.now_s, 0.0))
                tasks.append(group.create_task(ask(body, due_s)))
        return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A fixed number of users, each of whom asks again as soon as he is answered."""

    concurrency: int

    @property
    def words(self) -> str:
        """In the table of results."""
        return f"{self.concurrency} users" if self.concurrency > 1 else "1 user"

    @property
    def key(self) -> dict[str, float]:
        """What tells the row of this load from others."""
        return {"concurrency": self.concurrency}

    async def run(
        self, asker: Asker, bodies: Sequence[dict[str, Any]], seed: int, on_answer: Progress
    ) -> list[Answered]:
        """Hand the bodies to the users, in order."""
        answers: list[Answered] = []
        left = iter(bodies)

        async def user() -> None:
            for body in left:
                answers.append(await asker.ask(body))
                on_answer()

        async with asyncio.TaskGroup() as group:
            asker.begin()
            for _ in range(min(self.concurrency, len(bodies))):
                group.create_task(user())
        return answers


Loop = OpenLoop | ClosedLoop


@dataclass(frozen=True, kw_only=True)
class Server(RemoteServer):
    """Who is asked, and how."""

    model: str | None = None
    """The name to ask for; the first that the server lists if absent."""
    endpoint: str = "completions"
    extra_body: dict[str, Any] | None = None
    """Further fields of every body."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a server says about itself."""

    model: str
    vocab_size: int | None


def look(server: Server) -> Found:
    """Ask a server for its model and, where it tells, the size of its vocabulary.

    Raises:
        ValueError: it cannot be reached, or lists no model.
    """

    async def ask() -> Found:
        async with server.client() as client:
            try:
                model = server.model or await first_model(client)
                return Found(model, await _vocab_size(client))
            except httpx.HTTPError as error:
                raise ValueError(f"no server answers at {server.url}: {reason(error)}") from error

    return asyncio.run(ask())


async def _vocab_size(client: httpx.AsyncClient) -> int | None:
    """Our own servers say; others do not know the path."""
    reply = await client.get("/tokenizer_info")
    try:
        size = reply.json()["vocab_size"] if reply.status_code == 200 else None
    except (ValueError, LookupError, TypeError):
        return None
    return size if isinstance(size, int) and size > 0 else None


def run_load(
    server: Server,
    model: str,
    loop: Loop,
    asks: Sequence[Ask],
    *,
    seed: int = 0,
    num_warmups: int = 0,
    on_answer: Progress = lambda: None,
) -> list[Answered]:
    """Put a load on a server, and say what became of each request.

    Args:
        server: who is asked.
        model: by the name that it knows.
        loop: when it is asked.
        asks: what.
        seed: of the arrivals.
        num_warmups: requests that are sent before and not counted, one after another.
        on_answer: called after each counted request.

    Raises:
        ValueError: the endpoint cannot be asked this, or a request before the run fails.
    """
    is_chat = server.endpoint == "chat"
    bodies = [ask.body(is_chat=is_chat) for ask in asks]

    async def run() -> list[Answered]:
        async with server.client() as client:
            asker = Asker(
                client, model=model, endpoint=server.endpoint, extra_body=server.extra_body
            )
            for number in range(num_warmups):
                answered = await asker.ask(bodies[number % len(bodies)])
                if answered.error is not None:
                    raise ValueError(f"a request before the run failed: {answered.error}")
            return await loop.run(asker, bodies, seed, on_answer)

    return asyncio.run(run())


def figures(
    answers: Sequence[Answered], *, bounds: Bounds, cost_per_hour: float | None = None
) -> dict[str, Any]:
    """The figures of a run, under the names of `jaxserve bench sweep`.

    Latencies and tokens are of the requests that were answered; goodput counts the others, too.

    Args:
        answers: of all requests.
        bounds: what goodput counts.
        cost_per_hour: of the machine, in any currency.
    """
    good = [one for one in answers if one.error is None]
    wall_s = max((one.start_s + (one.e2e_s or 0.0) for one in answers), default=0.0)
    output_tokens = sum(one.output_tokens for one in good)
    rate = over(output_tokens, wall_s)
    failed = [one for one in answers if one.error is not None]
    latencies = [(one.ttft_s, one.tpot_s) if one.error is None else (None, None) for one in answers]
    return {
        "num_requests": len(answers),
        "num_answered": len(good),
        "num_refused": sum(one.is_refused for one in failed),
        "num_failed": sum(not one.is_refused for one in failed),
        "errors": dict(Counter(one.error for one in failed).most_common(10)),
        "max_in_flight": _most_at_once(answers),
        "wall_s": wall_s,
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "cached_tokens": sum(one.cached_tokens for one in good),
        "output_tokens": output_tokens,
        "output_tokens_per_s": rate,
        "requests_per_s": over(len(good), wall_s),
        **spread("ttft", [one.ttft_s for one in good if one.ttft_s is not None]),
        **spread("tpot", [one.tpot_s for one in good if one.tpot_s is not None]),
        **spread("itl", [gap for one in good for gap in one.gaps_s]),
        **spread("e2e", [one.e2e_s for one in good if one.e2e_s is not None]),
        **spread("late", [one.late_s for one in answers]),
        **goodput(bounds, latencies, wall_s),
        "cost_per_million_tokens": cost_per_million_tokens(cost_per_hour, rate),
    }


def _most_at_once(answers: Sequence[Answered]) -> int:
    """Requests under way at the fullest moment; an end comes before a start at the same time."""
    changes = sorted(
        change
        for one in answers
        if one.e2e_s is not None
        for change in ((one.start_s, 1), (one.start_s + one.e2e_s, -1))
    )
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def loops(
    rates: Sequence[float], concurrencies: Sequence[int], burstiness: float
) -> Iterator[Loop]:
    """The loads to run, one row of results each.

    Raises:
        ValueError: not exactly one of rates and concurrencies is given, or one is out of range.
    """
    if bool(rates) == bool(concurrencies):
        raise ValueError("give one of --request-rate (open loop) and --concurrency (closed loop)")
    for rate in rates:
        if not 0 < rate < float("inf"):
            raise ValueError(
                f"request_rate={rate} must be above 0 and finite; --concurrency sends as fast as "
                "answers come"
            )
        yield OpenLoop(rate, burstiness)
    for concurrency in concurrencies:
        if concurrency < 1:
            raise ValueError(f"concurrency={concurrency} must be at least 1")
        yield ClosedLoop(concurrency)

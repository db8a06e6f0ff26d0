"""A server under mixed load for minutes: nothing is lost, nothing grows, nothing compiles.

    python -m benchmarks.soak                      # ten minutes, the demo model
    python -m benchmarks.soak --minutes 1 --json soak.json

Of the requests a third is aborted by its client, a tenth is invalid, some clients read slowly, and
some answers are structured.  Each case is first run alone; whatever arrives later is compared with
that.  The load stops after every round until the server is idle: then no request and no page may
be left, and memory is read.  Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.served import Served, serve
from benchmarks.soak_load import (
    Answer,
    Bad,
    Case,
    WrongAnswerError,
    bad_requests,
    cases,
    check_alone,
    check_part,
    check_whole,
    send_bad,
    send_streamed,
    send_whole,
)

MAX_MODEL_LEN = 512
SLOTS = 16
MAX_GROWTH_MB = 20.0
WARM_UP_ROUNDS = 2
MEDIAN_OF = 3
IDLE_S = 10.0
"""Longest time until a server without clients is idle."""
REQUEST_S = 120.0
SHARES = (0.1, 1 / 3, 0.05, 0.26, 0.26)
"""Of invalid requests, of aborted ones, of slow readers, of streamed and of whole answers."""


@dataclass(frozen=True)
class Idle:
    """A server that nobody asks anything."""

    num_sent: int
    memory_mb: float
    running: float
    waiting: float
    used_pages: float
    compilations: float


@dataclass
class Report:
    """What happened."""

    sent: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    num_problems: int = 0
    idle: list[Idle] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Count a problem; the first ones are kept."""
        self.num_problems += 1
        if len(self.problems) < 20:
            self.problems.append(text)
            print(f"PROBLEM {text}", flush=True)

    @property
    def growth_mb(self) -> float:
        """Memory at the end, less that after the warm-up rounds; medians, as allocators come and
        go by some MB."""
        memory = [idle.memory_mb for idle in self.idle[WARM_UP_ROUNDS:]] or [0.0]
        return statistics.median(memory[-MEDIAN_OF:]) - statistics.median(memory[:MEDIAN_OF])


class Soak:
    """One server, its clients and the answers they must get."""

    def __init__(self, served: Served, client: httpx.AsyncClient, seed: int) -> None:
        self._served = served
        self._client = client
        self._rng = random.Random(seed)
        self._cases = cases(seed)
        self._bad = bad_requests(MAX_MODEL_LEN)
        self._alone: list[Answer] = []
        self.report = Report()

    async def run(self, seconds: float, workers: int, round_s: float) -> None:
        """Everything: the cases alone, then rounds of load."""
        await self._run_alone()
        self._look()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            until = time.monotonic() + min(round_s, left)
            await asyncio.gather(*(self._work(until) for _ in range(workers)))
            self._look()

    async def _run_alone(self) -> None:
        for case in self._cases:
            answer = await send_whole(self._client, case)
            check_alone(case, answer)
            self._alone.append(answer)

    async def _work(self, until: float) -> None:
        while time.monotonic() < until:
            kind, number = self._choose()
            self.report.sent[kind] += 1
            try:
                async with asyncio.timeout(REQUEST_S):
                    await self._send(kind, number)
            except TimeoutError:
                self.report.problem(f"{kind} {number}: no end within {REQUEST_S} s")
            except (WrongAnswerError, httpx.HTTPError, ValueError) as error:
                self.report.problem(f"{kind} {number}: {type(error).__name__}: {error}")

    def _choose(self) -> tuple[str, int]:
        kind = self._rng.choices(("invalid", "aborted", "slow", "streamed", "whole"), SHARES)[0]
        choices: list[Bad] | list[Case] = self._bad if kind == "invalid" else self._cases
        return kind, self._rng.randrange(len(choices))

    async def _send(self, kind: str, number: int) -> None:
        client = self._client
        if kind == "invalid":
            return await send_bad(client, self._bad[number])
        case, alone = self._cases[number], self._alone[number]
        if kind == "aborted":
            return await self._abort(case, alone)
        if kind == "whole":
            return check_whole(case, await send_whole(client, case), alone)
        pause_s = 0.3 if kind == "slow" else 0.0
        check_whole(case, await send_streamed(client, case, pause_s=pause_s), alone)

    async def _abort(self, case: Case, alone: Answer) -> None:
        """Leave a stream after some chunks, or a whole answer before it comes."""
        if self._rng.random() < 0.7:
            chunks = self._rng.choice((0, 1, 2, 4, 8))
            check_part(case, await send_streamed(self._client, case, chunks=chunks), alone)
            return
        try:
            async with asyncio.timeout(self._rng.choice((0.005, 0.02, 0.1))):
                check_whole(case, await send_whole(self._client, case), alone)
        except TimeoutError:
            pass

    def _look(self) -> None:
        """Wait until the server is idle, and write down how it is."""
        deadline = time.monotonic() + IDLE_S
        while (now := self._idle()).running or now.waiting or now.used_pages:
            if time.monotonic() > deadline:
                self.report.problem(f"not idle after {IDLE_S} s without clients: {now}")
                break
            time.sleep(0.1)
        self.report.idle.append(now)
        print(json.dumps(asdict(now)), flush=True)
        if now.compilations != self.report.idle[0].compilations:
            self.report.problem(f"compiled while serving: {now}")

    def _idle(self) -> Idle:
        metrics = self._served.metrics()
        pages = json.loads(self._served.get("/server_status"))["pages"]
        return Idle(
            num_sent=self.report.sent.total(),
            memory_mb=round(self._served.memory_bytes() / 2**20, 2),
            running=metrics["jaxserve:num_requests_running"],
            waiting=metrics["jaxserve:num_requests_waiting"],
            used_pages=pages["used"],
            compilations=metrics["jaxserve:xla_compilations_total"],
        )


async def soak(served: Served, options: argparse.Namespace) -> Report:
    """Put load on a server."""
    # Pooled connections: an aborted stream closes its own, all others are used again.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.workers)
    timeout = httpx.Timeout(REQUEST_S)
    async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=timeout) as client:
        load = Soak(served, client, options.seed)
        await load.run(60 * options.minutes, options.workers, options.round_s)
        return load.report


def summary(report: Report) -> dict[str, Any]:
    """The report as plain data."""
    return {
        "sent": dict(report.sent),
        "num_sent": report.sent.total(),
        "num_problems": report.num_problems,
        "problems": report.problems,
        "growth_mb": round(report.growth_mb, 2),
        "max_growth_mb": MAX_GROWTH_MB,
        "compilations": report.idle[-1].compilations,
        "idle": [asdict(idle) for idle in report.idle],
    }


def main() -> int:
    """Run it; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the demo model if absent")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=24, help="requests under way at once")
    parser.add_argument("--round-s", type=float, default=30.0, help="load between two looks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args()
    flags = ("--max-model-len", f"{MAX_MODEL_LEN}", "--max-num-seqs", f"{SLOTS}")
    with serve(*flags, model=options.model) as served:
        report = asyncio.run(soak(served, options))
    if report.growth_mb >= MAX_GROWTH_MB:
        report.problem(f"memory grew by {report.growth_mb:.1f} MB, bound {MAX_GROWTH_MB} MB")
    result = summary(report)
    print(json.dumps({key: value for key, value in result.items() if key != "idle"}, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if report.num_problems else 0


if __name__ == "__main__":
    sys.exit(main())

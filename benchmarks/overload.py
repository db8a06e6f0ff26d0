"""More clients than a server has files for: every one gets an answer or a clear refusal (B47).

    python -m benchmarks.overload                   # 600 requests at once, at most 512 open files

First 200 idle connections are opened and kept.  Then all requests are sent at once, each on a
connection of its own.  Right are 200, and 429 or 503 with Retry-After; a connection that is reset
is one too many for the limit of open files, and there may be no more of those than are above it.
Afterwards a request must have its usual answer in its usual time, on a new connection and on an
idle one.  Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import ssl
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.served import Served, serve

NUM_IDLE = 200
MAX_FILES = 512
CANARY = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
SHORT = {"prompt": "One, two,", "max_tokens": 4, "temperature": 0}
MAX_SLOWDOWN = 5.0
"""How much slower the canary may be afterwards, on top of a tenth of a second."""


# Made once: it takes longer than a request.
NO_TLS = ssl.create_default_context()


async def send(url: str, body: dict[str, Any]) -> tuple[str, str]:
    """One request on a connection of its own: what became of it, and the text."""
    try:
        async with httpx.AsyncClient(base_url=url, timeout=300, verify=NO_TLS) as client:
            response = await client.post("/v1/completions", json=body)
    except httpx.TransportError as error:
        return type(error).__name__, ""
    if response.status_code == 200:
        return "200", response.json()["choices"][0]["text"]
    if response.status_code in (429, 503) and response.headers.get("retry-after"):
        return f"{response.status_code} with Retry-After", ""
    return f"{response.status_code}: {response.text[:100]}", ""


async def timed_canary(url: str) -> tuple[str, float]:
    """The canary's text and its seconds; the best of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        status, text = await send(url, CANARY)
        times.append(time.perf_counter() - start)
        if status != "200":
            raise RuntimeError(f"the canary got {status}")
    return text, min(times)


async def ask_on(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    """Whether an idle connection is still good for a request."""
    reader, writer = connection
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await writer.drain()
    return (await reader.readline()).startswith(b"HTTP/1.1 200")


async def overload(served: Served, count: int) -> dict[str, Any]:
    """Put load on a server, and say what happened."""
    address = urlsplit(served.url)
    before, before_s = await timed_canary(served.url)
    num_own_files = served.num_files()
    idle = [await asyncio.open_connection(address.hostname, address.port) for _ in range(NUM_IDLE)]
    start = time.perf_counter()
    done = await asyncio.gather(*(send(served.url, SHORT) for _ in range(count)))
    seconds = time.perf_counter() - start
    outcomes = Counter(outcome for outcome, _ in done)
    texts = {text for outcome, text in done if outcome == "200"}
    num_kept = sum([await ask_on(connection) for connection in idle])
    for _, writer in idle:
        writer.close()
    after, after_s = await timed_canary(served.url)
    problems = []
    resets = sum(n for outcome, n in outcomes.items() if outcome[0].isalpha())
    refused = sum(n for outcome, n in outcomes.items() if "Retry-After" in outcome)
    if resets > max(0, count + NUM_IDLE + num_own_files - MAX_FILES):
        problems.append(f"{resets} connections were reset, more than the limit of files explains")
    if outcomes["200"] + refused + resets != count or not outcomes["200"]:
        problems.append(f"wrong statuses: {dict(outcomes)}")
    if len(texts) > 1:
        problems.append(f"one request had several answers: {texts}")
    if num_kept != NUM_IDLE:
        problems.append(f"{NUM_IDLE - num_kept} of {NUM_IDLE} idle connections were lost")
    if after != before:
        problems.append(f"the canary gave {after!r}, before it was {before!r}")
    if after_s > MAX_SLOWDOWN * before_s + 0.1:
        problems.append(f"the canary took {after_s:.3f} s, before it was {before_s:.3f} s")
    return {
        "requests": count,
        "seconds": seconds,
        "outcomes": dict(outcomes),
        "own_files": num_own_files,
        "canary_s": [before_s, after_s],
        "problems": problems,
    }


def main() -> int:
    """Run it; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the demo model if absent")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--json", type=Path, help="file for the report")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # this side has enough
    with serve("--max-queue", "128", model=options.model, max_files=MAX_FILES) as served:
        result = asyncio.run(overload(served, options.requests))
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

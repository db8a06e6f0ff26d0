"""What structured output costs, and that plain neighbours do not notice it.

    python -m benchmarks.structured_speed                 # 32 requests, the demo model
    python -m benchmarks.structured_speed --json structured.json

All through one server.  The structured requests run once to see how many tokens each takes and
that every output validates.  Then structured and plain ones run in turn, each request with its own
number of tokens as `max_tokens` on both sides, so that both make the same number of tokens in the
same batch shapes; the result is the median of the rounds' ratios of tokens per second.  Last, half
of the requests are structured and half are plain: the plain ones must give the text that they give
alone.  Exit code 1 if anything is wrong or the ratio is below the bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from benchmarks.served import serve

MIN_RATIO = 0.8
MAX_TOKENS = 160
TEXT = {"type": "string", "minLength": 16, "maxLength": 32}
SCHEMAS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "city": TEXT,
            "population": {"type": "integer", "minimum": 1000, "maximum": 9999999},
            "sights": {"type": "array", "items": TEXT, "minItems": 3, "maxItems": 3},
        },
        "required": ["city", "population", "sights"],
        "additionalProperties": False,
    },
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 100, "maximum": 999},
        "minItems": 20,
        "maxItems": 20,
    },
    {
        "type": "object",
        "properties": {
            "title": TEXT,
            "genre": {"enum": ["novel", "poem", "play"]},
            "chapters": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"name": TEXT, "pages": {"enum": [12, 34, 56]}},
                    "required": ["name", "pages"],
                    "additionalProperties": False,
                },
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "required": ["title", "genre", "chapters"],
        "additionalProperties": False,
    },
)
REGEX = r"[A-Z][a-z]{4,8}( [a-z]{3,9}){12}\."


@dataclass(frozen=True)
class Ask:
    """One request; what its text must look like if it is structured."""

    body: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None
    regex: str | None = None

    def plain(self) -> Ask:
        """The same request without the constraint, never ended early."""
        body = {k: v for k, v in self.body.items() if k != "structured_outputs"}
        return Ask({**body, "ignore_eos": True})

    def of(self, max_tokens: int) -> Ask:
        """The same request with exactly so many tokens."""
        return Ask({**self.body, "max_tokens": max_tokens}, self.schema, self.regex)

    def check(self, text: str) -> None:
        """Raise unless a whole answer is what was asked for."""
        if self.schema is not None:
            jsonschema.validate(json.loads(text), self.schema)
        if self.regex is not None and not re.fullmatch(self.regex, text):
            raise ValueError(f"{text!r} does not match {self.regex!r}")


REGEX_KIND = len(SCHEMAS)
KINDS = {
    "all": tuple(range(REGEX_KIND + 1)),
    "schemas": tuple(range(REGEX_KIND)),
    "regex": (REGEX_KIND,),
}
"""Kinds of requests that can be measured together: schemas by their index, and the expression."""


def asks(count: int, kinds: Sequence[int] = KINDS["all"]) -> list[Ask]:
    """Structured requests of some kinds in turn."""
    return [_ask(number, kinds[number % len(kinds)]) for number in range(count)]


def _ask(number: int, kind: int) -> Ask:
    body = {
        "prompt": f"Example {number}: a record about something well known.\n",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8,
        "seed": number,
    }
    if kind == REGEX_KIND:
        return Ask({**body, "structured_outputs": {"regex": REGEX}}, regex=REGEX)
    schema = SCHEMAS[kind]
    return Ask({**body, "structured_outputs": {"json": schema}}, schema=schema)


@dataclass(frozen=True)
class Done:
    """One answer."""

    text: str
    num_tokens: int
    finish_reason: str


async def send(client: httpx.AsyncClient, ask: Ask) -> Done:
    """Send one request."""
    response = await client.post("/v1/completions", json=ask.body)
    response.raise_for_status()
    body = response.json()
    choice = body["choices"][0]
    return Done(choice["text"], body["usage"]["completion_tokens"], choice["finish_reason"])


async def together(client: httpx.AsyncClient, wanted: Sequence[Ask]) -> tuple[list[Done], float]:
    """Send all at once; the answers and the tokens per second."""
    start = time.perf_counter()
    done = await asyncio.gather(*(send(client, ask) for ask in wanted))
    return done, sum(answer.num_tokens for answer in done) / (time.perf_counter() - start)


async def measure(
    client: httpx.AsyncClient, structured: Sequence[Ask], rounds: int
) -> dict[str, Any]:
    """The three parts, as figures."""
    problems = []
    done, _ = await together(client, structured)
    for ask, answer in zip(structured, done, strict=True):
        if answer.finish_reason != "stop":
            problems.append(f"not finished within {MAX_TOKENS} tokens: {answer}")
        else:
            try:
                ask.check(answer.text)
            except (ValueError, jsonschema.ValidationError) as error:
                problems.append(f"{answer.text!r}: {error}")
    equal = [ask.of(answer.num_tokens) for ask, answer in zip(structured, done, strict=True)]
    rates: dict[str, list[float]] = {"structured": [], "plain": []}
    for number in range(rounds):
        again, rate = await together(client, equal)
        rates["structured"].append(rate)
        if [a.text for a in again] != [a.text for a in done]:
            problems.append(f"round {number}: the structured answers have changed")
        others, rate = await together(client, [ask.plain() for ask in equal])
        rates["plain"].append(rate)
        if [a.num_tokens for a in others] != [a.num_tokens for a in done]:
            problems.append(f"round {number}: the plain answers have other lengths")
        print({kind: round(values[-1], 1) for kind, values in rates.items()}, flush=True)
    problems += await neighbours(client, equal)
    ratios = [s / p for s, p in zip(rates["structured"], rates["plain"], strict=True)]
    return {
        "requests": len(structured),
        "tokens": sum(answer.num_tokens for answer in done),
        "tokens_per_s": rates,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "min_ratio": MIN_RATIO,
        "problems": problems,
    }


async def neighbours(client: httpx.AsyncClient, wanted: Sequence[Ask]) -> list[str]:
    """Plain requests alone, then with as many structured ones beside them."""
    plain = [ask.plain() for ask in wanted[::2]]
    alone = [await send(client, ask) for ask in plain]
    mixed, _ = await together(client, [*plain, *wanted[1::2]])
    return [
        f"a plain neighbour gave {beside.text!r}, alone {one.text!r}"
        for one, beside in zip(alone, mixed, strict=False)
        if one != beside
    ]


async def ask_server(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one server."""
    limits = httpx.Limits(max_connections=options.requests)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=600) as client:
        return await measure(client, asks(options.requests, KINDS[options.kinds]), options.rounds)


def main() -> int:
    """Measure, print, and write JSON if asked; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the demo model if absent")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", choices=KINDS, default="all", help="of the requests")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with serve("--max-num-seqs", f"{options.requests}", model=options.model) as served:
        result = asyncio.run(ask_server(served.url, options))
    print("\n".join(result["problems"]))
    print(f"structured / plain: {result['ratio']:.3f} (bound {MIN_RATIO})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["problems"] or result["ratio"] < MIN_RATIO else 0


if __name__ == "__main__":
    sys.exit(main())

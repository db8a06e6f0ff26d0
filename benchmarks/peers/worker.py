"""The engine's side of the pipe: load once, then generate what each line asks for.

Runs in the environment of any engine, so it imports the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts and how many tokens of each -> the tokens, greedy, end tokens ignored."""


@dataclass(frozen=True)
class Loaded:
    """An engine that is ready."""

    generate: Generate
    facts: dict[str, Any]
    """What a reader of the numbers wants to know: versions, types, sizes."""
    at_end: Callable[[], dict[str, Any]] = dict
    """More facts, asked for after the last work: what it counted, or what costs memory to find."""


def serve(load: Callable[[dict[str, Any]], Loaded]) -> None:
    """Answer lines of JSON from standard input until it ends.

    `{"prompts", "max_tokens"}` is answered by `{"seconds", "tokens"}`, the seconds being those of
    `generate` alone; `{}` by the facts at the end.  The options are the one argument of the
    command, as JSON.
    """
    # Engines print to standard output; the pipe is for answers alone.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as pipe:
        os.dup2(2, 1)

        def answer(value: dict[str, Any]) -> None:
            pipe.write(json.dumps(value) + "\n")
            pipe.flush()

        try:
            start = time.perf_counter()
            engine = load(json.loads(sys.argv[1]))
            answer({"load_s": time.perf_counter() - start, **engine.facts})
            for line in sys.stdin:
                ask = json.loads(line)
                answer(_timed(engine.generate, **ask) if ask else engine.at_end())
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from None


def versions(*packages: str) -> dict[str, str]:
    """Installed versions, Python's among them."""
    return {
        "python": sys.version.split()[0],
        **{package: metadata.version(package) for package in packages},
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _timed(generate: Generate, prompts: list[list[int]], max_tokens: list[int]) -> dict[str, Any]:
    start = time.perf_counter()
    tokens = generate(prompts, max_tokens)
    return {"seconds": time.perf_counter() - start, "tokens": tokens}

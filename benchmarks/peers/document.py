"""The record of a run as one JSON document, free of paths and addresses.

Knows results.  Does not know how they are shown.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.engines import Engine
from benchmarks.peers.measure import Results
from benchmarks.peers.summary import ratios, rows
from benchmarks.peers.work import Item

_ADDRESS = re.compile(r"\b\w+://\S+")
_PATH = re.compile(r"(?<![\w.)])~?(?:/[\w.+@-]+){2,}/?")


def document(
    machine: dict[str, Any],
    settings: dict[str, Any],
    engines: Sequence[Engine],
    items: Sequence[Item],
    results: Results,
) -> dict[str, Any]:
    """All that a report needs: facts, every turn, and the summaries of them."""
    turns = [{**dataclasses.asdict(turn), "quiet": turn.quiet} for turn in results.turns]
    pairs = [
        (mine.name, other.name)
        for mine in engines
        for other in engines
        if mine.ours and not other.ours and mine.weights == other.weights
    ]
    whole = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine,
        "settings": settings,
        "engines": [_engine(engine, results) for engine in engines],
        "items": [_item(item) for item in items],
        "rows": rows(turns),
        "ratios": ratios(turns, pairs),
        "agreement": results.agreement,
        "memory": results.memory,
        "turns": turns,
    }
    return _clean(whole)


def without_paths(text: str) -> str:
    """The text with absolute paths and addresses of the machine it was made on taken out."""
    return _PATH.sub("(path)", _ADDRESS.sub("(address)", text))


def _engine(engine: Engine, results: Results) -> dict[str, Any]:
    return {
        "name": engine.name,
        "family": engine.family,
        "weights": engine.weights,
        "error": results.failed.get(engine.name),
        "facts": results.facts.get(engine.name, {}),
    }


def _item(item: Item) -> dict[str, Any]:
    return {
        "name": item.name,
        "kind": item.kind,
        "slots": item.slots,
        "engine_slots": item.engine_slots,
        "requests": len(item.requests),
        "prompt_tokens": sum(len(request.prompt) for request in item.requests),
        "output_tokens": item.output_tokens,
    }


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_paths(value)
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value

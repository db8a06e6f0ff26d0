"""Medians, pairs and agreement: from turns to the numbers of a table.  Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes, and how far these are apart as a share of the median.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to summarise")
    median = statistics.median(values)
    least, most = min(values), max(values)
    return {"median": median, "min": least, "max": most, "spread": (most - least) / median}


def rows(turns: Iterable[Record]) -> list[dict[str, Any]]:
    """One row per item and engine, in order of appearance.

    Each has `tokens_per_s` and `seconds` as of `spread`, and how many repeats there were, how
    many of them quiet.
    """
    found = []
    for (item, engine), mine in _grouped(turns).items():
        found.append(
            {
                "item": item,
                "engine": engine,
                "repeats": len(mine),
                "quiet": sum(bool(turn["quiet"]) for turn in mine),
                "tokens_per_s": spread([turn["tokens_per_s"] for turn in mine]),
                "seconds": spread([turn["seconds"] for turn in mine]),
                "first_s": _spread_or_none([turn["first_s"] for turn in mine]),
                "own_cores": statistics.median(turn["own_cores"] for turn in mine),
            }
        )
    return found


def ratios(turns: Iterable[Record], pairs: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """How many times faster the first engine of a pair is, per item.

    The ratio of rates is taken within each repeat, where the two ran close together, and the
    median is of these; a repeat that only one of them did is left out.
    """
    grouped = _grouped(turns)
    found = []
    for item in dict.fromkeys(item for item, _ in grouped):
        for ours, peer in pairs:
            mine, theirs = (_rates(grouped.get((item, name), [])) for name in (ours, peer))
            common = sorted(mine.keys() & theirs.keys())
            if common:
                values = [mine[repeat] / theirs[repeat] for repeat in common]
                pair = {"item": item, "ours": ours, "peer": peer, "pairs": len(values)}
                found.append({**pair, **spread(values)})
    return found


def agreement(
    tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Share of tokens equal to the reference's up to each request's first difference.

    After one different token the texts go separate ways, so what follows is not compared.

    Returns:
        `equal_share` of all tokens, `equal_requests` and `requests`, and `first_differences`:
        per request that differs, the position of the first other token, in order.
    """
    firsts = [first_difference(a, b) for a, b in zip(tokens, reference, strict=True)]
    lengths = [len(row) for row in reference]
    equal = sum(
        length if first is None else first for first, length in zip(firsts, lengths, strict=True)
    )
    return {
        "equal_share": equal / max(1, sum(lengths)),
        "equal_requests": sum(first is None for first in firsts),
        "requests": len(firsts),
        "first_differences": sorted(first for first in firsts if first is not None),
    }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first different token; None if one is as long as the other and equal."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def _grouped(turns: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    found: dict[tuple[str, str], list[Record]] = {}
    for turn in turns:
        found.setdefault((turn["item"], turn["engine"]), []).append(turn)
    return found


def _rates(turns: Iterable[Record]) -> dict[int, float]:
    return {turn["repeat"]: turn["tokens_per_s"] for turn in turns}


def _spread_or_none(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return spread(known) if known else None

"""What a file of results holds: a sweep's rows, or a trace of steps.

Knows the formats of `--save-result` of `jaxserve bench sweep` and `jaxserve bench serve`, and of
`jaxserve simulate --steps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A row per batch size or load."""

    label: str
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TraceFile:
    """Steps in order."""

    label: str
    num_slots: int
    steps: tuple[Mapping[str, Any], ...]


def read(path: str | Path) -> SweepFile | TraceFile:
    """Read either kind; a trace may be one object with `steps`, or a line of JSON per step.

    Raises:
        ValueError: it is neither.
        OSError: it cannot be read.
    """
    path = Path(path)
    content = path.read_bytes()
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError:
        value = {"steps": _lines(path, content)}
    if isinstance(value, dict) and "start_s" in value:
        value = {"steps": [value]}  # a trace of one line
    if not isinstance(value, dict):
        raise _neither(path)
    label = str(value.get("label") or path.stem)
    if _are_rows(value.get("rows"), "output_tokens_per_s"):
        return SweepFile(label, tuple(value["rows"]))
    if _are_rows(value.get("steps"), "start_s", "seconds", "slots"):
        steps = value["steps"]
        return TraceFile(label, value.get("num_slots") or _num_slots(steps), tuple(steps))
    raise _neither(path)


def _lines(path: Path, content: bytes) -> list[Any]:
    try:
        return [msgspec.json.decode(line) for line in content.splitlines() if line.strip()]
    except msgspec.DecodeError:
        raise _neither(path) from None


def _are_rows(value: Any, *keys: str) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(row, dict) and all(key in row for key in keys) for row in value)
    )


def _num_slots(steps: Sequence[Mapping[str, Any]]) -> int:
    """As many as were ever used."""
    return 1 + max((slot[0] for step in steps for slot in step["slots"]), default=0)


def _neither(path: Path) -> ValueError:
    return ValueError(
        f"{str(path)!r} is neither a sweep (`jaxserve bench sweep` or `bench serve` with "
        "--save-result FILE) nor a trace of steps (`jaxserve simulate --steps FILE`)"
    )

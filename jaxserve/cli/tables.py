"""Nested figures as aligned text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; all but the last aligned to the right."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    last = len(header) - 1
    return "\n".join(
        "  ".join(
            cell if i == last else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def sections(values: Mapping[str, Any]) -> str:
    """A mapping as `name  value` lines; a mapping inside it becomes a section of its own."""
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
    width = max(map(len, plain), default=0)
    blocks = ["\n".join(f"{name:<{width}}  {text(name, v)}" for name, v in plain.items())]
    for name, inner in values.items():
        if isinstance(inner, Mapping):
            body = sections({str(key): value for key, value in inner.items()})
            blocks.append("\n".join([name, *(f"  {line}" for line in body.splitlines())]))
    return "\n".join(block for block in blocks if block)


def text(name: str, value: Any) -> str:
    """A value for people: bytes as MiB where the name says bytes, lists joined, None as a dash."""
    if value is None:
        return "-"
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return f"{value / 2**20:,.1f} MiB"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(text("", item) for item in value)
    return str(value)

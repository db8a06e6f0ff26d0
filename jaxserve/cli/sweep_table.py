"""A sweep's rows as text.

`bench sweep` and `tune` print it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.cli.tables import table

_LATENCIES = ("ttft", "tpot", "itl")
_PARTS = ("mean", "p50", "p99")


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per batch size, with goodput and cost where there are any.

    Latencies are in milliseconds, shares in per cent.
    """
    extras = _extras(rows)
    latencies = [f"{name.upper()} mean/P50/P99" for name in _LATENCIES]
    header = ["batch", "tokens/s", *latencies, "slots", "KV waste", *extras]
    return table(header, [_cells(row, extras) for row in rows])


def _cells(row: Mapping[str, Any], extras: Mapping[str, str]) -> list[str]:
    return [
        str(row["max_num_seqs"]),
        _number(row["output_tokens_per_s"]),
        *("/".join(_number(row[f"{n}_{p}_s"], 1e3) for p in _PARTS) for n in _LATENCIES),
        _number(row["slot_utilisation"], 100, " %"),
        _number(row["kv_waste"], 100, " %"),
        *(_number(row[key]) for key in extras.values()),
    ]


def _extras(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    columns = {"goodput/s": "goodput_requests_per_s", "cost/M tokens": "cost_per_million_tokens"}
    return {name: key for name, key in columns.items() if any(row[key] is not None for row in rows)}


def _number(value: float | None, scale: float = 1.0, unit: str = "") -> str:
    if value is None:
        return "-"
    scaled = scale * value
    return f"{scaled:,.0f}{unit}" if scaled >= 1000 else f"{scaled:.3g}{unit}"

"""The trade-off between throughput and latency, as a curve and by batch size or load.

`curve` prepares the data of a `jaxserve bench sweep` or `jaxserve bench serve` file, `draw` makes
the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.plot.figure import COLORS, new_figure, plain
from jaxserve.plot.knee import knee

LATENCIES = tuple(
    f"{name}_{part}" for name in ("itl", "tpot", "ttft", "e2e") for part in ("mean", "p50", "p99")
)
"""What may be on the latency axis."""
_WORDS = {
    "itl": "time between tokens",
    "tpot": "time per output token",
    "ttft": "time to first token",
    "e2e": "time to last token",
    "mean": "mean",
    "p50": "median",
    "p99": "P99",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """What differs between the points of a curve."""

    key: str
    """Its name in a row."""
    name: str
    form: str
    """How one value is said."""
    words: str
    """Along an axis."""


AXES = (
    Axis("max_num_seqs", "batch size", "batch {:g}", "batch size (most sequences at once)"),
    Axis("concurrency", "users", "{:g} users", "users, each with one request at a time"),
    Axis("request_rate", "request rate", "{:g} requests/s", "requests per second that arrive"),
)
"""Of the rows of `bench sweep`, and of `bench serve` in a closed and in an open loop."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A sweep's points, by increasing batch size or load."""

    label: str
    axis: Axis
    sizes: tuple[float, ...]
    """Values of the axis."""
    throughput: tuple[float, ...]
    """Output tokens per second."""
    latency_ms: tuple[float, ...]

    @property
    def knee(self) -> int | None:
        """Index of the point at the knee, if there is one."""
        return knee(list(zip(self.latency_ms, self.throughput, strict=True)))


def curve(label: str, rows: Sequence[Mapping[str, Any]], latency: str) -> Curve:
    """The points of a sweep.

    Args:
        label: name in the legend.
        rows: of `jaxserve bench sweep` or `jaxserve bench serve`.
        latency: one of LATENCIES.

    Raises:
        ValueError: a row lacks a figure, there is no row, or the rows vary in nothing known.
    """
    if not rows:
        raise ValueError(f"{label}: the sweep has no rows")
    axis = next((axis for axis in AXES if all(axis.key in row for row in rows)), None)
    if axis is None:
        names = ", ".join(axis.key for axis in AXES)
        raise ValueError(f"{label}: no one of {names} is in every row")
    points = []
    for row in rows:
        values = [row.get(key) for key in (axis.key, "output_tokens_per_s", f"{latency}_s")]
        if any(value is None for value in values):
            raise ValueError(
                f"{label}: the row of {axis.form.format(row[axis.key])} has no {latency}_s; "
                f"choose another of {', '.join(LATENCIES)}"
            )
        points.append(values)
    sizes, throughput, seconds = zip(*sorted(points), strict=True)
    return Curve(label, axis, sizes, throughput, tuple(1e3 * s for s in seconds))


def _common_axis(curves: Sequence[Curve]) -> Axis:
    axes = list(dict.fromkeys(one.axis for one in curves))
    if len(axes) > 1:
        raise ValueError(
            f"the files differ in what they vary ({', '.join(axis.key for axis in axes)}); draw "
            "one kind in a picture"
        )
    return axes[0]


def latency_words(latency: str) -> str:
    """The latency as an axis names it."""
    name, part = latency.split("_")
    return f"{_WORDS[part]} {_WORDS[name]}, ms"


def draw(curves: Sequence[Curve], latency: str, title: str = "") -> Any:
    """A figure: throughput against latency, and both against the batch size or load.

    Raises:
        ValueError: there is no matplotlib, or the curves differ in what they vary.
    """
    axis = _common_axis(curves)
    figure = new_figure(12, 4.8)
    left, right = figure.subplots(1, 2)
    _against_latency(left, curves, latency, axis)
    _against_size(right, curves, latency, axis)
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def _against_latency(axes: Any, curves: Sequence[Curve], latency: str, axis: Axis) -> None:
    plain(axes)
    low = 0.05 * max(max(one.throughput) for one in curves)
    for one, color in zip(curves, _colors(curves), strict=True):
        axes.plot(one.latency_ms, one.throughput, "o-", color=color, label=one.label, markersize=5)
        for size, x, y in zip(one.sizes, one.latency_ms, one.throughput, strict=True):
            beside = (8, -12) if y > low else (9, -3)  # the axis is below a low point
            axes.annotate(f"{size:g}", (x, y), beside, textcoords="offset points", fontsize=8.5)
        if one.knee is not None:
            _mark(axes, one, one.knee, color)
    axes.margins(0.08)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(latency_words(latency))
    axes.set_ylabel("throughput, output tokens/s")
    axes.set_title(f"Throughput against latency (number: {axis.name})", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _mark(axes: Any, one: Curve, index: int, color: str) -> None:
    size, throughput = one.axis.form.format(one.sizes[index]), one.throughput[index]
    axes.plot(
        one.latency_ms[index],
        throughput,
        "o",
        markersize=14,
        markerfacecolor="none",
        markeredgecolor=color,
        markeredgewidth=1.8,
        label=f"knee: {size}, {throughput:,.0f} tokens/s at {one.latency_ms[index]:.3g} ms",
    )


def _against_size(axes: Any, curves: Sequence[Curve], latency: str, axis: Axis) -> None:
    plain(axes)
    other = axes.twinx()
    other.spines["top"].set_visible(False)
    for one, color in zip(curves, _colors(curves), strict=True):
        axes.plot(one.sizes, one.throughput, "o-", color=color, markersize=5)
        other.plot(one.sizes, one.latency_ms, "s--", color=color, markersize=4.5)
    sizes = sorted({size for one in curves for size in one.sizes})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    other.set_ylim(bottom=0)
    axes.set_xlabel(axis.words)
    axes.set_ylabel("throughput, output tokens/s (solid)")
    other.set_ylabel(f"{latency_words(latency)} (dashed)")
    axes.set_title(f"Both by {axis.name}", fontsize=10)


def _colors(curves: Sequence[Curve]) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(curves))]

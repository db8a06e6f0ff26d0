"""The trade-off between throughput and latency, as a curve and by batch size.

`curves` prepares the data of `jaxserve bench sweep` files, `draw` makes the picture.
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
class Curve:
    """A sweep's points, by increasing batch size."""

    label: str
    batch_sizes: tuple[int, ...]
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
        rows: of `jaxserve bench sweep`.
        latency: one of LATENCIES.

    Raises:
        ValueError: a row lacks a figure, or there is no row.
    """
    points = []
    for row in rows:
        values = [row.get(key) for key in ("max_num_seqs", "output_tokens_per_s", f"{latency}_s")]
        if any(value is None for value in values):
            raise ValueError(
                f"{label}: the row of {row.get('max_num_seqs')} sequences has no {latency}_s; "
                f"choose another of {', '.join(LATENCIES)}"
            )
        points.append(values)
    if not points:
        raise ValueError(f"{label}: the sweep has no rows")
    sizes, throughput, seconds = zip(*sorted(points), strict=True)
    return Curve(label, sizes, throughput, tuple(1e3 * s for s in seconds))


def latency_words(latency: str) -> str:
    """The latency as an axis names it."""
    name, part = latency.split("_")
    return f"{_WORDS[part]} {_WORDS[name]}, ms"


def draw(curves: Sequence[Curve], latency: str, title: str = "") -> Any:
    """A figure: throughput against latency, and both against the batch size.

    Raises:
        ValueError: there is no matplotlib.
    """
    figure = new_figure(12, 4.8)
    left, right = figure.subplots(1, 2)
    _against_latency(left, curves, latency)
    _against_size(right, curves, latency)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _against_latency(axes: Any, curves: Sequence[Curve], latency: str) -> None:
    plain(axes)
    low = 0.05 * max(max(one.throughput) for one in curves)
    for one, color in zip(curves, _colors(curves), strict=True):
        axes.plot(one.latency_ms, one.throughput, "o-", color=color, label=one.label, markersize=5)
        for size, x, y in zip(one.batch_sizes, one.latency_ms, one.throughput, strict=True):
            beside = (8, -12) if y > low else (9, -3)  # the axis is below a low point
            axes.annotate(f"{size}", (x, y), beside, textcoords="offset points", fontsize=8.5)
        if one.knee is not None:
            _mark(axes, one, one.knee, color)
    axes.margins(0.08)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(latency_words(latency))
    axes.set_ylabel("throughput, output tokens/s")
    axes.set_title("Throughput against latency (number: batch size)", fontsize=10)
    axes.legend(frameon=False, fontsize=9, loc="best")


def _mark(axes: Any, one: Curve, index: int, color: str) -> None:
    axes.plot(
        one.latency_ms[index],
        one.throughput[index],
        "o",
        markersize=14,
        markerfacecolor="none",
        markeredgecolor=color,
        markeredgewidth=1.8,
        label=f"knee: batch {one.batch_sizes[index]}, {one.throughput[index]:,.0f} tokens/s "
        f"at {one.latency_ms[index]:.3g} ms",
    )


def _against_size(axes: Any, curves: Sequence[Curve], latency: str) -> None:
    plain(axes)
    other = axes.twinx()
    other.spines["top"].set_visible(False)
    for one, color in zip(curves, _colors(curves), strict=True):
        axes.plot(one.batch_sizes, one.throughput, "o-", color=color, markersize=5)
        other.plot(one.batch_sizes, one.latency_ms, "s--", color=color, markersize=4.5)
    sizes = sorted({size for one in curves for size in one.batch_sizes})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    other.set_ylim(bottom=0)
    axes.set_xlabel("batch size (most sequences at once)")
    axes.set_ylabel("throughput, output tokens/s (solid)")
    other.set_ylabel(f"{latency_words(latency)} (dashed)")
    axes.set_title("Both by batch size", fontsize=10)


def _colors(curves: Sequence[Curve]) -> list[str]:
    return [COLORS[i % len(COLORS)] for i in range(len(curves))]

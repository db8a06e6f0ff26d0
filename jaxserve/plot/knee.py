"""The knee of a trade-off curve: where more latency stops buying much throughput.

Knows pairs of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]


def knee(points: Sequence[Point]) -> int | None:
    """Index of the knee by Kneedle (Satopaa, Albrecht, Irwin, Raghavan, ICDCSW 2011).

    Latencies x and throughputs y of the front are scaled to [0, 1].  The knee of the increasing,
    concave curve is the point that lies highest above the diagonal: argmax of y - x.  Kneedle
    smooths its data first and takes every local maximum above a threshold, for streams that have
    several; a sweep has a handful of points, which are their own curve, and one is marked.

    Args:
        points: (latency, throughput) in any units.

    Returns:
        None where there is no knee: fewer than three points on the front, or none of them above
        the diagonal between its ends.
    """
    indices = front(points)
    if len(indices) < 3:
        return None
    xs = _scaled([points[i][0] for i in indices])
    ys = _scaled([points[i][1] for i in indices])
    heights = [y - x for x, y in zip(xs, ys, strict=True)]
    highest = max(range(len(indices)), key=heights.__getitem__)
    return indices[highest] if heights[highest] > _ROUNDING else None


_ROUNDING = 1e-9
"""Points of a straight line come out this close to its diagonal."""


def front(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other beats, by latency: less of it, or more throughput.

    Their throughputs increase, so that the curve through them is the trade-off.
    """
    best: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not best or points[index][1] > points[best[-1]][1]:
            best.append(index)
    return best


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) for value in values]

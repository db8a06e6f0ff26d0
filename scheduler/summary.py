"""The figures of a simulation: rates, percentiles, shares.

Knows what a `Simulation` recorded.  The names are those of `jaxserve bench throughput` where they
mean the same; times are in seconds, shares between 0 and 1, None where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scheduler.simulation import KVUse, Simulation

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request must keep to count as served well; None is no bound."""

    ttft_s: float | None = None
    """Most seconds to the first token."""
    tpot_s: float | None = None
    """Most seconds per output token after the first, on average over the request."""

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.ttft_s is not None or self.tpot_s is not None

    def hold(self, ttft_s: float | None, tpot_s: float | None) -> bool:
        """Whether a request keeps them; one without a second token has no TPOT to miss."""
        if ttft_s is None:
            return False
        in_time = self.ttft_s is None or ttft_s <= self.ttft_s
        return in_time and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)


def percentile(values: Sequence[float], q: float) -> float:
    """The `q`-th percentile, linear between the two nearest values, as NumPy's default."""
    ordered = sorted(values)
    place = q / 100 * (len(ordered) - 1)
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles as `name_mean_s`, `name_p50_s` and so on."""
    figures: dict[str, float | None] = {
        f"{name}_mean_s": sum(values) / len(values) if values else None
    }
    for q in PERCENTILES:
        figures[f"{name}_p{q}_s"] = percentile(values, q) if values else None
    return figures


def summarise(simulation: Simulation) -> dict[str, Any]:
    """All figures of a simulation."""
    requests, steps, wall_s = simulation.requests, simulation.steps, simulation.wall_s
    output_tokens = sum(len(request.token_times_s) for request in requests)
    num_steps = sum(step.work.num_steps for step in steps)
    padded = sum(step.padded_tokens for step in steps)
    busy_s = sum(step.seconds for step in steps)
    stats = simulation.stats
    return {
        "num_requests": len(requests),
        "prompt_tokens": sum(request.arrival.num_prompt for request in requests),
        "output_tokens": output_tokens,
        "wall_s": wall_s,
        "output_tokens_per_s": over(output_tokens, wall_s),
        "requests_per_s": over(len(requests), wall_s),
        "steps": num_steps,
        "dispatches": len(steps),
        "step_s": over(busy_s, num_steps),
        "device_busy_share": over(busy_s, wall_s),
        "slot_utilisation": over(output_tokens, num_steps * simulation.num_slots),
        "padded_share": over(padded - sum(step.tokens for step in steps), padded),
        "discarded_tokens": stats.discarded_tokens,
        "preemptions": stats.num_preemptions,
        "prefix_query_tokens": stats.prefix_query_tokens,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        **_kv(simulation.kv, num_steps, simulation),
        **spread("ttft", _known([request.ttft_s for request in requests])),
        **spread("tpot", _known([request.tpot_s for request in requests])),
        **spread("itl", [gap for request in requests for gap in request.itl_s]),
        **spread("e2e", _known([request.e2e_s for request in requests])),
        **goodput(simulation.bounds, [(r.ttft_s, r.tpot_s) for r in requests], wall_s),
    }


def cost_per_million_tokens(
    cost_per_hour: float | None, output_tokens_per_s: float | None
) -> float | None:
    """What a million output tokens cost on a machine of that price, in its currency."""
    if cost_per_hour is None or not output_tokens_per_s:
        return None
    return cost_per_hour / 3600 / output_tokens_per_s * 1e6


def _kv(kv: KVUse, num_steps: int, simulation: Simulation) -> dict[str, float | None]:
    """How full the pool was, and how much of what sequences hold was not in use."""
    peak = max((step.held_pages for step in simulation.steps), default=0)
    return {
        "kv_page_use": over(kv.held_pages, num_steps * simulation.num_pages),
        "kv_page_use_peak": over(peak, simulation.num_pages),
        **kv.waste(),
    }


def goodput(
    bounds: Bounds, latencies: Sequence[tuple[float | None, float | None]], wall_s: float
) -> dict[str, float | None]:
    """Requests per second that kept the bounds (DistServe, OSDI '24), and their share.

    Args:
        bounds: to keep; without any there is no goodput.
        latencies: TTFT and TPOT of each request.
        wall_s: seconds in which they were served.
    """
    if not bounds.any:
        return {"goodput_requests_per_s": None, "goodput_share": None}
    num_good = sum(bounds.hold(ttft_s, tpot_s) for ttft_s, tpot_s in latencies)
    return {
        "goodput_requests_per_s": over(num_good, wall_s),
        "goodput_share": over(num_good, len(latencies)),
    }


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def over(value: float, whole: float) -> float | None:
    """A share or a rate; None of nothing."""
    return value / whole if whole else None

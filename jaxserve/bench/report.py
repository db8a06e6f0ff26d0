"""Figures of a finished run, from its outputs and the engine's counters.

Does not know how the run was made.  A figure that is not known is None, null in JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.outputs import RequestOutput

if TYPE_CHECKING:
    from jaxserve.stats import EngineStats


def make_report(
    outputs: Sequence[RequestOutput], wall_s: float, stats: EngineStats
) -> dict[str, Any]:
    """Sum up a run.

    Args:
        outputs: the finished requests.
        wall_s: seconds from the first step to the last.
        stats: the engine's counters of the same time.

    Returns:
        Counts, times in seconds, rates per second and shares between 0 and 1; goodput only where
        the engine has latency bounds.
    """
    samples = [sample for output in outputs for sample in output.outputs]
    output_tokens = sum(len(sample.token_ids) for sample in samples)
    ttft = [o.metrics.ttft for o in outputs if o.metrics.ttft is not None]
    itl = [gap for output in outputs for gap in output.metrics.itl]
    return {
        "num_requests": len(outputs),
        "num_errors": sum(sample.finish_reason == "error" for sample in samples),
        "prompt_tokens": sum(len(output.prompt_token_ids) for output in outputs),
        "output_tokens": output_tokens,
        "wall_s": wall_s,
        "output_tokens_per_s": output_tokens / wall_s if wall_s > 0 else None,
        "steps": stats.steps,
        "dispatches": stats.dispatches,
        "step_s": stats.step_s,
        "host_s_per_step": stats.host_s_per_step,
        "slot_utilisation": stats.slot_utilisation,
        "padded_share": stats.padded_share,
        "discarded_tokens": stats.discarded_tokens,
        "preemptions": stats.preemptions,
        "swaps": stats.swaps,
        "prefix_query_tokens": stats.prefix_query_tokens,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "compilations_after_ready": stats.compilations_after_ready,
        **_percentiles("ttft", ttft),
        **_percentiles("itl", itl),
        **_goodput(stats, wall_s, len(outputs)),
    }


def _goodput(stats: EngineStats, wall_s: float, num_requests: int) -> dict[str, float | None]:
    """Requests that met the engine's latency bounds, and how many of them per second."""
    if stats.num_in_bounds is None:
        return {}
    return {
        "goodput_requests_per_s": stats.num_in_bounds / wall_s if wall_s > 0 else None,
        "goodput_share": stats.num_in_bounds / num_requests if num_requests else None,
    }


def _percentiles(name: str, values: list[float]) -> dict[str, float | None]:
    import numpy as np  # here, as `jaxserve --help` would feel it

    return {
        f"{name}_p{q}_s": float(np.percentile(values, q)) if values else None for q in (50, 90, 99)
    }


def summary_line(report: dict[str, Any]) -> str:
    """The figures that say whether a run went well, in one line."""
    return (
        f"{_count(report['num_requests'], 'request')}, "
        f"{_count(report['output_tokens'], 'token')} in {report['wall_s']:.2f} s: "
        f"{_number(report['output_tokens_per_s'])} tokens/s, "
        f"TTFT median {_number(report['ttft_p50_s'])} s, "
        f"slot utilisation {_number(report['slot_utilisation'])}, "
        f"compilations after ready = {report['compilations_after_ready']}"
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

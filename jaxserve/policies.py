"""What the configuration says about policies, as objects of the scheduler.

Knows `EngineConfig` and names of classes.  Does not know what a policy decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.shapes import ShapeSet
from jaxserve.stats import LatencyTargets
from scheduler import AdmissionPolicy, Continuous, Dynamic, Static
from scheduler.step_time import Buckets, FittedCost


def admission_policy(
    config: EngineConfig, clock: Callable[[], float] = time.monotonic
) -> AdmissionPolicy:
    """When waiting sequences may join those that run; the window is of the clock's seconds."""
    if config.batching == "static":
        return Static()
    if config.batching == "dynamic":
        return Dynamic(config.dynamic_window_ms / 1000, clock)
    return Continuous()


def latency_targets(config: EngineConfig) -> LatencyTargets | None:
    """The bounds that requests are to meet; None without any."""
    targets = LatencyTargets(_seconds(config.target_ttft_ms), _seconds(config.target_tpot_ms))
    return targets if targets.ttft_s is not None or targets.tpot_s is not None else None


def step_cost(config: EngineConfig, shapes: ShapeSet) -> FittedCost | None:
    """A model of step times that knows nothing yet; None where no bound needs one."""
    if latency_targets(config) is None:
        return None
    return FittedCost(Buckets(shapes.decode_rows, shapes.chunks))


def scheduling_limits(config: EngineConfig, shapes: ShapeSet) -> dict[str, Any]:
    """Fields of `SchedulerConfig` that policies are made of."""
    most = min(shapes.max_chunk, config.max_num_batched_tokens)
    most = min(most, config.max_prefill_tokens or most)
    return {
        "max_prefill_tokens": most,
        # A smaller chunk is padded to this, and takes as long.
        "min_prefill_tokens": min(shapes.chunks[0], most),
        "mixed": config.mixed,
        "policy": config.scheduling_policy,
        "priority_ageing_s": config.priority_ageing_s,
        "fair_share": config.fair_share,
        "target_ttft_s": _seconds(config.target_ttft_ms),
        "target_tpot_s": _seconds(config.target_tpot_ms),
    }


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000

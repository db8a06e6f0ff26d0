"""What the configuration says about policies, as objects of the scheduler.

Knows `EngineConfig` and names of classes.  Does not know what a policy decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxserve.config import EngineConfig
from jaxserve.shapes import ShapeSet
from scheduler import (
    AdmissionPolicy,
    BlockPool,
    Continuous,
    Dynamic,
    Scheduler,
    SchedulerConfig,
    Static,
    SwapSpace,
)
from scheduler.step_time import Buckets, FittedCost, StepCost
from scheduler.summary import Bounds


def admission_policy(
    config: EngineConfig, clock: Callable[[], float] = time.monotonic
) -> AdmissionPolicy:
    """When waiting sequences may join those that run; the window is of the clock's seconds."""
    if config.batching == "static":
        return Static()
    if config.batching == "dynamic":
        return Dynamic(config.dynamic_window_ms / 1000, clock)
    return Continuous()


def latency_targets(config: EngineConfig) -> Bounds | None:
    """The bounds that requests are to meet; None without any."""
    targets = Bounds(_seconds(config.target_ttft_ms), _seconds(config.target_tpot_ms))
    return targets if targets.any else None


def step_cost(config: EngineConfig, shapes: ShapeSet) -> FittedCost | None:
    """A model of step times that knows nothing yet; None where no bound needs one."""
    if latency_targets(config) is None:
        return None
    return FittedCost(Buckets(shapes.decode_rows, shapes.chunks))


def make_scheduler(
    config: EngineConfig,
    shapes: ShapeSet,
    *,
    clock: Callable[[], float],
    cost: StepCost | None,
    num_host_pages: int = 0,
    page_cost_tokens: float = 0.0,
) -> Scheduler:
    """The scheduler of an engine, or of its simulation.

    Args:
        config: with nothing left open.
        shapes: the compiled sizes.
        clock: the time in seconds, real or virtual.
        cost: a model of step times, for the latency bounds.
        num_host_pages: of the swap space.
        page_cost_tokens: see `SchedulerConfig`.

    Raises:
        ValueError: the limits contradict each other.
    """
    assert config.max_model_len is not None
    assert config.num_kv_blocks is not None
    assert config.block_size is not None
    assert config.multi_step is not None
    most = min(shapes.max_chunk, config.max_num_batched_tokens)
    most = min(most, config.max_prefill_tokens or most)
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_prefill_tokens=most,
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,  # type: ignore[arg-type]  # checked by EngineConfig
        priority_ageing_s=config.priority_ageing_s,
        fair_share=config.fair_share,
        mixed=config.mixed,
        # A smaller chunk is padded to this, and takes as long.
        min_prefill_tokens=min(shapes.chunks[0], most),
        target_ttft_s=_seconds(config.target_ttft_ms),
        target_tpot_s=_seconds(config.target_tpot_ms),
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
        preemption=config.preemption,  # type: ignore[arg-type]  # checked by EngineConfig
        page_cost_tokens=page_cost_tokens,
        multi_step=config.multi_step,
    )
    return Scheduler(
        limits,
        BlockPool(config.num_kv_blocks, config.block_size),
        admission_policy(config, clock),
        SwapSpace(num_host_pages),
        clock=clock,
        cost=cost,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000

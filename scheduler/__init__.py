"""Continuous batching over a paged KV cache, decided on the host with the standard library only.

`Scheduler` turns waiting and running `Sequence`s into a `StepPlan` per step of the device; a
`BlockPool` says who owns which page of the KV cache.
"""

from scheduler.block_pool import NULL_PAGE, BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import ScheduledTokens, StepPlan, Update
from scheduler.policy import AdmissionPolicy, Continuous, Dynamic, Static
from scheduler.prefix_cache import PrefixCache
from scheduler.residents import SchedulerStats
from scheduler.scheduler import Scheduler
from scheduler.sequence import FinishReason, Sequence, Status
from scheduler.swap_space import PageCopy, SwapSpace

__all__ = [
    "NULL_PAGE",
    "AdmissionPolicy",
    "BlockPool",
    "Continuous",
    "Dynamic",
    "FinishReason",
    "PageCopy",
    "PrefixCache",
    "ScheduledTokens",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "Sequence",
    "Static",
    "Status",
    "StepPlan",
    "SwapSpace",
    "Update",
]

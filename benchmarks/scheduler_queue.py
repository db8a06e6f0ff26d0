"""What the scheduler costs per step, with short and long queues, policy by policy.

All slots decode; about one sequence ends per step, the next comes out of the queue, and another is
added to it.  No device is there: tokens are made up.  Medians of single turns, in microseconds, of
`schedule`, `pack_batch` and `update`, and the 99th percentile of their sum; beside them what it
takes to add a sequence.  A cost that grew with the queue would show from line to line.

    python benchmarks/scheduler_queue.py --rows 32 --queues 10 1000 10000 --json queue.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.batch import BatchLayout, pack_batch
from jaxserve.shapes import StepShape
from scheduler import (
    AdmissionPolicy,
    BlockPool,
    Dynamic,
    Scheduler,
    SchedulerConfig,
    Sequence,
    Static,
)
from scheduler.step_time import FittedCost, StepWork

PAGE_SIZE = 64
CHUNK = 512
NUM_PROMPT = 16
MEAN_OUTPUT = 32
POLICIES: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "priority": {"policy": "priority"},
    "priority, ageing": {"policy": "priority", "priority_ageing_s": 10.0},
    "fair share, 1 key": {"fair_share": True},
    "fair share, 100 keys": {"fair_share": True},
    "fair share, a key each": {"fair_share": True},
    "not mixed": {"mixed": False},
    "static": {},
    "dynamic": {},
    "latency bound": {"target_tpot_s": 1.0},
}
NUM_KEYS = {"fair share, 100 keys": 100, "fair share, a key each": 10**9}
ADMISSION: dict[str, Callable[[], AdmissionPolicy]] = {
    "static": Static,
    "dynamic": lambda: Dynamic(0.0, time.monotonic),
}


class Load:
    """A scheduler that is never idle, and a queue that keeps its length."""

    def __init__(self, name: str, rows: int, num_queued: int) -> None:
        limits = POLICIES[name]
        self.cost = FittedCost() if "target_tpot_s" in limits else None
        admission = ADMISSION.get(name, lambda: None)()
        config = SchedulerConfig(
            max_num_seqs=rows,
            token_budget=CHUNK + rows,
            max_prefill_tokens=CHUNK,
            max_model_len=1024,
            **limits,
        )
        pool = BlockPool(1 + rows * 1024 // PAGE_SIZE, PAGE_SIZE)
        self.scheduler = Scheduler(config, pool, admission, clock=time.monotonic, cost=self.cost)
        self._layouts = {
            chunk: BatchLayout(StepShape(rows, chunk), rows, PAGE_SIZE) for chunk in (0, CHUNK)
        }
        self._rng = random.Random(0)
        self._num_keys = NUM_KEYS.get(name, 1)
        self._num_added = 0
        for _ in range(rows + num_queued):
            self.add()

    def add(self) -> float:
        """Queue one more; the seconds it took."""
        self._num_added += 1
        seq = Sequence(
            f"{self._num_added}",
            [self._num_added] * NUM_PROMPT,
            self._rng.randint(2, 2 * MEAN_OUTPUT),
            priority=self._rng.randint(0, 3),
            key=f"{self._num_added % self._num_keys}",
        )
        start = time.perf_counter()
        self.scheduler.add(seq)
        return time.perf_counter() - start

    def turn(self) -> tuple[dict[str, float], int]:
        """Seconds by part of one turn, and the sequences that ended in it."""
        times = [time.perf_counter()]
        plan = self.scheduler.schedule()
        times.append(time.perf_counter())
        pack_batch(plan, self._layouts[CHUNK if plan.num_chunk_tokens else 0])
        times.append(time.perf_counter())
        sampled = [[1] * entry.num_samples for entry in plan.entries]
        times.append(time.perf_counter())
        if self.cost is not None:
            self.cost.record(StepWork.of(plan), 0.01)
        update = self.scheduler.update(plan, sampled)
        times.append(time.perf_counter())
        schedule, pack, _, end = np.diff(times).tolist()
        return {"schedule": schedule, "pack": pack, "update": end}, len(update.finished)


def measure(name: str, rows: int, num_queued: int, num_turns: int) -> dict[str, Any]:
    """Microseconds of a turn by part, all of them with `rows` slots in use."""
    load = Load(name, rows, num_queued)
    parts: list[dict[str, float]] = []
    adds: list[float] = []
    while len(parts) < num_turns:
        took, num_ended = load.turn()
        if load.scheduler.num_running == rows or name in ADMISSION:
            parts.append(took)
        adds += [load.add() for _ in range(num_ended)]
    totals = sorted(sum(part.values()) for part in parts)
    medians = {key: statistics.median(part[key] for part in parts) for key in parts[0]}
    return {
        "policy": name,
        "rows": rows,
        "queue": num_queued,
        **{f"{key}_us": 1e6 * value for key, value in medians.items()},
        "total_us": 1e6 * statistics.median(totals),
        "total_p99_us": 1e6 * totals[int(0.99 * len(totals))],
        "add_us": 1e6 * statistics.median(adds),
    }


def main() -> None:
    """Print a table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32, help="slots, all in use")
    parser.add_argument("--queues", type=int, nargs="+", default=[10, 1000, 10000])
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    rows = []
    columns = ("schedule_us", "pack_us", "update_us", "total_us", "total_p99_us", "add_us")
    print(f"{'policy':24}{'queue':>8}" + "".join(f"{column:>14}" for column in columns))
    for name in options.policies:
        for num_queued in options.queues:
            row = measure(name, options.rows, num_queued, options.turns)
            rows.append(row)
            figures = "".join(f"{row[column]:14.1f}" for column in columns)
            print(f"{name:24}{num_queued:8}{figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

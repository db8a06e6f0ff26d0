"""How well the simulator predicts the engine: total time and P99 of the gaps between tokens.

    python -m benchmarks.simulator --slots 8,16

For each number of slots and each batching policy the engine serves random requests, from which a
table of its step times is made, and the workload, all taking turns.  The simulator then predicts
the workload from that table alone: it has seen none of the workload's steps.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from jaxserve import LLM
from jaxserve.bench.simulation import simulate_config, workload_arrivals
from jaxserve.bench.step_table import empty_table, recorded
from jaxserve.bench.throughput import WorkloadRequest, measure, read_workload
from jaxserve.cli.tables import table

WORKLOAD = Path(__file__).parents[1] / "tests" / "smollm2" / "workload.json"
POLICIES = ("continuous", "static", "dynamic")
MAX_MODEL_LEN = 512
TIME_BOUND, ITL_BOUND = 0.10, 0.25
"""Largest relative errors that pass, of the total time and of the P99 gap."""


def calibration(seed: int, num_requests: int) -> list[WorkloadRequest]:
    """Random requests with lengths like the workload's; none is one of its requests."""
    rng = random.Random(seed)
    return [
        WorkloadRequest(
            prompt_token_ids=[rng.randrange(40_000) for _ in range(rng.randint(16, 256))],
            max_tokens=min(int(8 * rng.paretovariate(0.7)), 256),
        )
        for _ in range(num_requests)
    ]


def engines(slots: int) -> dict[str, LLM]:
    """An engine of each policy, alike in all else."""
    return {
        policy: LLM(
            batching=policy,
            max_num_seqs=slots,
            max_model_len=MAX_MODEL_LEN,
            num_kv_blocks=slots * MAX_MODEL_LEN // 64 + 1,
            block_size=64,
            # The calibration must not find the prompts of its first round in the cache.
            enable_prefix_caching=False,
        )
        for policy in POLICIES
    }


def compare(slots: int, requests: list[WorkloadRequest], rounds: int) -> list[dict[str, Any]]:
    """Predicted and measured figures of each policy."""
    llms = engines(slots)
    learned = empty_table(next(iter(llms.values())).engine)
    measured: dict[str, list[dict[str, Any]]] = {policy: [] for policy in llms}
    for llm in llms.values():
        measure(llm, calibration(0, slots), ignore_eos=True)  # makes the machine warm
    for number in range(1, rounds + 1):
        for policy, llm in llms.items():
            with recorded(llm.engine, learned):
                measure(llm, calibration(number, 6 * slots), ignore_eos=True)
            measured[policy].append(measure(llm, requests, ignore_eos=True))
    predicted = {
        policy: simulate_config(
            llm.config, workload_arrivals(WORKLOAD), learned, record_slots=False
        ).summary()
        for policy, llm in llms.items()
    }
    for llm in llms.values():
        llm.close()
    return [
        {
            "slots": slots,
            "policy": policy,
            "steps": (predicted[policy]["steps"], measured[policy][0]["steps"]),
            "wall_s": _pair(predicted[policy], measured[policy], "wall_s"),
            "itl_p99_s": _pair(predicted[policy], measured[policy], "itl_p99_s"),
        }
        for policy in llms
    ]


def _pair(
    predicted: dict[str, Any], measured: Sequence[dict[str, Any]], name: str
) -> tuple[float, float]:
    return predicted[name], statistics.median(report[name] for report in measured)


def error(pair: tuple[float, float]) -> float:
    """Of the prediction, relative to what was measured."""
    return pair[0] / pair[1] - 1


def _cells(row: dict[str, Any]) -> list[str]:
    (time_s, real_s), (gap_s, real_gap_s) = row["wall_s"], row["itl_p99_s"]
    return [
        str(row["slots"]),
        row["policy"],
        "{} / {}".format(*row["steps"]),
        f"{time_s:.2f}",
        f"{real_s:.2f}",
        f"{error(row['wall_s']):+.1%}",
        f"{1e3 * gap_s:.1f}",
        f"{1e3 * real_gap_s:.1f}",
        f"{error(row['itl_p99_s']):+.1%}",
        "yes" if passes(row) else "NO",
    ]


def passes(row: dict[str, Any]) -> bool:
    """Both errors are within their bounds."""
    return abs(error(row["wall_s"])) <= TIME_BOUND and abs(error(row["itl_p99_s"])) <= ITL_BOUND


@click.command()
@click.option("--slots", default="8,16", show_default=True, help="Slots of the engines.")
@click.option("--rounds", default=3, show_default=True, help="Runs; the median counts.")
def main(slots: str, rounds: int) -> None:
    """Print a line per policy and number of slots, and a verdict."""
    requests = read_workload(WORKLOAD)
    rows: list[dict[str, Any]] = []
    header = (
        *("slots", "policy", "steps", "predicted s", "measured s", "error"),
        *("predicted P99 ITL ms", "measured", "error", "within bounds"),
    )
    for count in slots.split(","):
        rows += compare(int(count), requests, rounds)
        click.echo(table(header, map(_cells, rows)))
    good = all(map(passes, rows))
    click.echo(
        f"total time within {TIME_BOUND:.0%} and P99 ITL within {ITL_BOUND:.0%}: "
        f"{'yes' if good else 'no'}, in {sum(map(passes, rows))} of {len(rows)} cases"
    )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()

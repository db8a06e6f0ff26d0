"""Random schedules of the same requests: no bit of any result may depend on the schedule.

    python -m tests.engine.random_schedules --count 10000

runs as many, and prints how many results differed.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from jaxserve.files import cache_directory
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.weights import load_cpu_kernels
from tests.engine import native
from tests.engine.mini import Mini, prompts, run

Ask = tuple[list[int], SamplingParams]


def requests() -> list[Ask]:
    """Greedy and seeded, short and long, some with a common prefix of two pages, some constrained:
    by what ends them early, and by what they could follow for ever."""
    shared = prompts([40], seed=5)[0]
    asked = [shared + tail for tail in prompts([1, 7, 16, 30], seed=6)]
    asked += prompts([1, 2, 15, 16, 17, 33, 64, 90], seed=7)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 20},
        {"temperature": 0, "presence_penalty": 0.7, "repetition_penalty": 1.1},
        {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-z]{3}-[0-9]{2,4}"}},
        {"temperature": 0, "structured_outputs": {"regex": "([a-m]{2}[0-9]{1,2};)*"}},
    ]
    return [
        (prompt, SamplingParams(max_tokens=4 + 3 * i % 13, ignore_eos=True, logprobs=3, **kind))
        for i, (prompt, kind) in enumerate(zip(asked, kinds * len(asked), strict=False))
    ]


def fingerprint(output: RequestOutput) -> bytes:
    """Tokens, and every reported log-probability to the last bit."""
    sample = output.outputs[0]
    assert sample.logprobs is not None
    parts = [struct.pack(f"<{len(sample.token_ids)}i", *sample.token_ids)]
    for entry in sample.logprobs:
        parts += [struct.pack("<if", token, entry[token].logprob) for token in sorted(entry)]
    return b"".join(parts)


def alone(mini: Mini, asked: list[Ask]) -> list[bytes]:
    """The results of the requests one by one, each in an engine of its own."""
    return [fingerprint(run(mini.engine(), [request])[0]) for request in asked]


@dataclass
class Tally:
    """What the schedules did."""

    results: int = 0
    different: int = 0
    preemptions: int = 0
    swaps: int = 0
    prefix_hits: int = 0
    mixed_steps: int = 0
    shared_dispatches: int = 0
    """Steps beyond one of a dispatch."""


def run_schedules(mini: Mini, asked: list[Ask], want: list[bytes], seeds: range) -> Iterator[Tally]:
    """Run one schedule per seed; the tally so far after each."""
    tally = Tally()
    for seed in seeds:
        rng = random.Random(seed)
        chosen = rng.sample(range(len(asked)), rng.randint(2, len(asked)))
        budget = rng.choice([16, 40, 64])
        engine = mini.engine(
            slots=rng.randint(1, 8),
            chunk=min(budget, rng.choice([1, 3, 16, 17, 40, 64])),
            budget=budget,
            pages=rng.choice([9, 12, 20, 200]),
            asynchronous=rng.random() < 0.8,
            multi_step=rng.choice([1, 1, 2, 4, 8]),
            enable_prefix_caching=rng.random() < 0.7,
            preemption=rng.choice(["recompute", "swap"]),
            host_pages=rng.choice([4, 64]),
        )
        outputs = run(engine, [asked[i] for i in chosen], every=rng.choice([0, 0, 1, 3]))
        differ = sum(fingerprint(o) != want[i] for o, i in zip(outputs, chosen, strict=True))
        stats = engine.stats()
        tally.results += len(chosen)
        tally.different += differ
        tally.preemptions += stats.preemptions
        tally.swaps += engine.scheduler.stats.num_swaps
        tally.prefix_hits += stats.prefix_hit_tokens
        tally.mixed_steps += sum(n for s, n in stats.steps_by_shape.items() if "mixed" in s)
        tally.shared_dispatches += stats.steps - stats.dispatches
        yield tally


@click.command()
@click.option("--count", default=10_000, show_default=True, help="Schedules to run.")
@click.option("--first", default=0, show_default=True, help="Seed of the first one.")
@click.option("--cpu-kernels", default="auto", show_default=True, help="Instruction set.")
def main(count: int, first: int, cpu_kernels: str) -> None:
    """Run random schedules and print how many results differ from those of solo runs."""
    kernels = load_cpu_kernels(cpu_kernels, cache_directory(None) / "kernels")
    if kernels is None:
        raise click.ClickException("the CPU kernels cannot be had here")
    mini = native.build(Path(cache_directory(None)) / "executables", kernels)
    asked = requests()
    want = alone(mini, asked)
    tally = Tally()
    for done, tally in enumerate(run_schedules(mini, asked, want, range(first, first + count)), 1):
        if done % 500 == 0:
            click.echo(f"{done} schedules on {kernels}: {tally}")
    click.echo(f"{count} schedules on {kernels}: {tally}")
    raise SystemExit(1 if tally.different else 0)


if __name__ == "__main__":
    main()

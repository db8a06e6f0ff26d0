"""`jaxserve tune`: latency bounds in, the largest batch size that keeps them out, as a profile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.load import LoadOptions, bound_options, load_options
from jaxserve.cli.machine import MachineOptions, machine_options
from jaxserve.cli.options import IntList, engine_options
from jaxserve.cli.sweep_table import sweep_table
from jaxserve.config import EngineConfig
from jaxserve.tuning_batch import Choice, bounds_text, choose, profile
from scheduler.summary import Bounds

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


@click.command("tune", cls=Verb)
@click.option(
    "--batch-sizes",
    type=IntList(),
    default=",".join(map(str, BATCH_SIZES)),
    help="To choose from; they take the place of --max-num-seqs.",
)
@click.option(
    "-o", "--output", metavar="FILE", help="Write the profile here, for --config; stdout if absent."
)
@bound_options(ttft_ms=500, tpot_ms=100)
@log_option
@load_options(closed_loop=True)
@machine_options
@engine_options(max_num_seqs=1)
def command(
    batch_sizes: tuple[int, ...],
    output: str | None,
    bounds: Bounds,
    cost_per_hour: float | None,
    load_options: LoadOptions,
    machine_options: MachineOptions,
    config: EngineConfig,
) -> None:
    """Find the largest batch size whose P99 of TTFT and of TPOT keep their bounds.

    The engine measures how long its steps take, the simulator predicts every batch size from
    that, and short runs confirm the prediction, or correct it.  With --simulate nothing is run:
    the prediction for a chip is the answer.
    """
    if min(batch_sizes) < 1:
        raise click.UsageError("--batch-sizes must be positive.")
    machine, load = machine_options.machine(load_options, config, max(batch_sizes))
    predict = partial(machine.row, load, bounds=bounds, cost_per_hour=cost_per_hour)
    runs = _runs(config, load_options, bounds, cost_per_hour)
    choice = choose(batch_sizes, predict, None if machine_options.simulate else runs, bounds)
    _report(choice, bounds)
    whose = f"; {machine_options.words}" if machine_options.simulate else ""
    text = profile(config, choice, bounds, f"{load_options.words}{whose}.")
    if output is None:
        click.echo(text, nl=False)
    else:
        Path(output).write_text(text, encoding="utf-8")
        click.echo(f"{output}: use it with --config {output}", err=True)


def _runs(
    config: EngineConfig, options: LoadOptions, bounds: Bounds, cost_per_hour: float | None
) -> Callable[[int], dict[str, Any]]:
    from jaxserve.bench.sweep import sweep
    from jaxserve.llm import LLM

    def run(size: int) -> dict[str, Any]:
        (row,) = sweep(
            lambda chosen: LLM(config=chosen),
            config,
            lambda llm: options.load(llm.model_config.vocab_size, llm.tokenizer.encode),
            [size],
            bounds=bounds,
            cost_per_hour=cost_per_hour,
            ignore_eos=options.is_synthetic,
        )
        return row

    return run


def _report(choice: Choice, bounds: Bounds) -> None:
    """Everything that was looked at, on stderr: stdout may be the profile."""
    click.echo(f"simulated\n{sweep_table(choice.predicted)}", err=True)
    if choice.measured:
        click.echo(f"\nmeasured\n{sweep_table(choice.measured)}", err=True)
    click.echo(f"\nthe largest batch with {bounds_text(bounds)}: {choice.batch_size}", err=True)

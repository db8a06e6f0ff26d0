"""`jaxserve bench sweep`: the same load at several maximum batch sizes, measured or simulated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from jaxserve.bench.sweep import BATCH_SIZES, sweep
from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.load import LoadOptions, bound_options, load_options
from jaxserve.cli.machine import MachineOptions, machine_options
from jaxserve.cli.options import IntList, engine_options
from jaxserve.cli.sweep_table import sweep_table
from jaxserve.config import EngineConfig
from scheduler.summary import Bounds


@click.command("sweep", cls=Verb)
@click.option(
    "--batch-sizes",
    type=IntList(),
    default=",".join(map(str, BATCH_SIZES)),
    help="Most sequences at once, one run each; they take the place of --max-num-seqs.",
)
@click.option("--ignore-eos", is_flag=True, help="Generate max_tokens whatever the model says.")
@bound_options(ttft_ms=None, tpot_ms=None)
@click.option("--json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--save-result", metavar="FILE", help="Write the JSON object here, too.")
@log_option
@load_options(closed_loop=False)
@machine_options
@engine_options(max_num_seqs=1)
def command(
    batch_sizes: tuple[int, ...],
    ignore_eos: bool,
    bounds: Bounds,
    cost_per_hour: float | None,
    json: bool,
    save_result: str | None,
    load_options: LoadOptions,
    machine_options: MachineOptions,
    config: EngineConfig,
) -> None:
    """Serve the same requests with at most 1, 4, 8, 16 and 32 at once, or simulate that.

    Throughput grows with the batch size, and so does the time between tokens; `jaxserve plot`
    draws the file of --save-result.  TTFT is the time to the first token from a request's arrival,
    TPOT its mean time per further token, ITL the time between two tokens.
    """
    if min(batch_sizes) < 1:
        raise click.UsageError("--batch-sizes must be positive.")
    bounds = bounds if bounds.any else _targets(config)
    ignore_eos = ignore_eos or load_options.is_synthetic
    rows: list[dict[str, Any]] = []
    if machine_options.simulate:
        machine, load = machine_options.machine(load_options, config, max(batch_sizes))
        for size in batch_sizes:
            rows.append(machine.row(load, size, bounds=bounds, cost_per_hour=cost_per_hour))
    else:
        for row in _measured(batch_sizes, ignore_eos, bounds, cost_per_hour, load_options, config):
            rows.append(row)
            click.echo(f"batch {row['max_num_seqs']} is done", err=True)
    report = {
        "simulated": machine_options.simulate,
        "machine": machine_options.words if machine_options.simulate else None,
        "model": config.model,
        "load": load_options.to_dict(),
        "max_ttft_s": bounds.ttft_s,
        "max_tpot_s": bounds.tpot_s,
        "cost_per_hour": cost_per_hour,
        "rows": rows,
    }
    encoded = msgspec.json.encode(report)
    if save_result is not None:
        Path(save_result).write_bytes(encoded + b"\n")
    click.echo(encoded if json else _text(load_options, machine_options, rows))


def _targets(config: EngineConfig) -> Bounds:
    """What the engine itself aims at, if anything."""
    ttft_ms, tpot_ms = config.target_ttft_ms, config.target_tpot_ms
    return Bounds(ttft_ms and ttft_ms / 1e3, tpot_ms and tpot_ms / 1e3)


def _measured(
    batch_sizes: tuple[int, ...],
    ignore_eos: bool,
    bounds: Bounds,
    cost_per_hour: float | None,
    options: LoadOptions,
    config: EngineConfig,
) -> Iterator[dict[str, Any]]:
    from jaxserve.llm import LLM

    return sweep(
        lambda chosen: LLM(config=chosen),
        config,
        lambda llm: options.load(llm.model_config.vocab_size, llm.tokenizer.encode),
        batch_sizes,
        bounds=bounds,
        cost_per_hour=cost_per_hour,
        ignore_eos=ignore_eos,
    )


def _text(load: LoadOptions, machine: MachineOptions, rows: list[dict[str, Any]]) -> str:
    how = f"simulated, {machine.words}" if machine.simulate else "measured"
    return f"{load.words}; {how}; times in ms\n{sweep_table(rows)}"

"""`jaxserve bench throughput`: a workload file in, figures out."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import click
import msgspec

from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.model import load_llm
from jaxserve.cli.options import engine_options
from jaxserve.cli.tables import sections
from jaxserve.config import EngineConfig


@click.command("throughput", cls=Verb)
@click.option(
    "--workload",
    required=True,
    metavar="FILE",
    help='JSON list of {"prompt_token_ids" or "prompt", "max_tokens"}.',
)
@click.option("--num-prompts", type=click.IntRange(min=1), help="Use only the first so many.")
@click.option("--ignore-eos", is_flag=True, help="Generate max_tokens whatever the model says.")
@click.option("--json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--output", metavar="FILE", help="Write the JSON object here, too.")
@click.option(
    "--step-table", metavar="FILE", help="Write the measured step times here, for simulate."
)
@click.option(
    "--cost-per-hour",
    type=click.FloatRange(0, min_open=True),
    help="Price of the machine, for the cost of a million output tokens.",
)
@log_option
@engine_options()
def command(
    workload: str,
    num_prompts: int | None,
    ignore_eos: bool,
    json: bool,
    output: str | None,
    step_table: str | None,
    cost_per_hour: float | None,
    config: EngineConfig,
) -> None:
    """Submit a whole workload at once, greedy, and measure until the last token.

    Times are in seconds; what is unknown is null.
    """
    from jaxserve.bench.step_table import written
    from jaxserve.bench.throughput import measure, read_workload
    from scheduler.summary import cost_per_million_tokens

    requests = read_workload(workload, num_prompts)
    llm = load_llm(config)
    with nullcontext() if step_table is None else written(llm.engine, step_table):
        report = measure(llm, requests, ignore_eos=ignore_eos)
    if cost_per_hour is not None:
        rate = report["output_tokens_per_s"]
        report["cost_per_million_tokens"] = cost_per_million_tokens(cost_per_hour, rate)
    encoded = msgspec.json.encode(report)
    if output is not None:
        Path(output).write_bytes(encoded + b"\n")
    click.echo(encoded if json else sections(report))

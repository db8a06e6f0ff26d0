"""`jaxserve bench startup`: fresh processes in, seconds by phase out."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.options import engine_options
from jaxserve.cli.tables import table, text
from jaxserve.config import EngineConfig


@click.command("startup", cls=Verb)
@click.option("--prompt", default="The sky is", help="What the first token continues.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Second starts to measure.")
@click.option(
    "--cold", is_flag=True, help="Begin with empty caches, and report that first start, too."
)
@click.option("--json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--output", metavar="FILE", help="Write the JSON object here, too.")
@log_option
@engine_options(warm_up=False)
def command(
    prompt: str, repeats: int, cold: bool, json: bool, output: str | None, config: EngineConfig
) -> None:
    """Start the engine in fresh processes and measure until the first token.

    Times are in seconds.  A second start finds the weights and the executables of an earlier one;
    a first start, with --cold, has nothing but the model's file.
    """
    from jaxserve.bench.startup import HEADER, measure, rows

    report = measure(config, prompt, repeats, cold=cold)
    encoded = msgspec.json.encode(report)
    if output is not None:
        Path(output).write_bytes(encoded + b"\n")
    if json:
        click.echo(encoded)
        return
    click.echo(table(HEADER, rows(report)))
    click.echo(f"peak memory: {text('peak_rss_bytes', report['peak_rss_bytes'])}")

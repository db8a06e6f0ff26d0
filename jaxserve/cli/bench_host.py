"""`jaxserve bench host`: what a step costs the host, on a device that computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.options import IntList
from jaxserve.cli.tables import table


@click.command("host", cls=Verb)
@click.option("--slots", type=IntList(), default="1,32,256", help="Sequences that run at once.")
@click.option("--turns", type=click.IntRange(min=1), default=200, help="Turns of the loop each.")
@click.option(
    "--step-ms", type=click.FloatRange(min=0), default=5.0, help="Time of a step of the device."
)
@click.option("--multi-step", type=click.IntRange(min=1), default=1, help="Steps of a dispatch.")
@click.option("--requests", type=click.IntRange(min=1), default=64, help="Of the ragged run.")
@click.option("--json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--output", metavar="FILE", help="Write the JSON object here, too.")
@log_option
def command(
    slots: tuple[int, ...],
    turns: int,
    step_ms: float,
    multi_step: int,
    requests: int,
    json: bool,
    output: str | None,
) -> None:
    """Measure the host's part of a step: the engine over a device of fixed step time.

    By number of slots, the time of a turn of the engine's loop: schedule, pack, update, output
    (text and times of the tokens) and the rest.  Then how long the device waits for the host
    while requests of many lengths come and go, and what starting a program with a step's
    arguments costs.
    """
    from jaxserve.bench.host import measure

    if min(slots) < 1:
        raise click.UsageError("--slots must be positive.")
    report = measure(slots, turns, step_ms / 1e3, multi_step, requests)
    encoded = msgspec.json.encode(report)
    if output is not None:
        Path(output).write_bytes(encoded + b"\n")
    click.echo(encoded if json else _text(report))


_PARTS = ("schedule", "pack", "update", "output", "other", "total")


def _text(report: dict[str, Any]) -> str:
    rows = [
        (
            str(row["slots"]),
            *(f"{1e6 * row[f'{part}_s']:.0f}" for part in _PARTS),
            f"{1e6 * sum(row[f'{part}_s'] for part in _PARTS[:3]):.0f}",
        )
        for row in report["host"]
    ]
    ragged, dispatch = report["ragged"], report["dispatch"]
    return "\n".join(
        [
            f"us per turn of the loop, jax {report['jax']}, steps of {1e3 * report['step_s']:g} ms",
            table(("slots", *_PARTS, "schedule + pack + update"), rows),
            "",
            f"ragged: {ragged['requests']} requests on {ragged['slots']} slots, "
            f"{ragged['steps']} steps in {ragged['dispatches']} dispatches; "
            f"the device is idle {100 * ragged['idle_share']:.2f} % of the time",
            f"dispatch: {1e6 * dispatch['call_s']:.0f} us ({1e6 * dispatch['thread_s']:.0f} us of "
            f"processor time) with {dispatch['weights']} weights and {dispatch['donated']} donated "
            f"arrays; a transfer by itself {1e6 * dispatch['put_s']:.0f} us",
        ]
    )

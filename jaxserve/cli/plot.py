"""`jaxserve plot`: files of results in, a picture out."""

from __future__ import annotations

from typing import Any

import click

from jaxserve.cli.base import Verb, log_option
from jaxserve.plot import curve, figure, timeline
from jaxserve.plot.files import SweepFile, TraceFile, read


@click.command("plot", cls=Verb)
@click.argument("files", nargs=-1, required=True, metavar="FILES...")
@click.option("-o", "--output", required=True, metavar="FILE", help="Ends in .png or .svg.")
@click.option(
    "--latency",
    type=click.Choice(curve.LATENCIES),
    default="itl_mean",
    help="On the latency axis of a sweep.",
)
@click.option("--title", default="", help="Above the picture.")
@log_option
def command(files: tuple[str, ...], output: str, latency: str, title: str) -> None:
    """Draw FILES of `bench sweep` or `bench serve` as throughput against latency.

    Step traces become timelines.

    The knee of a curve is the point highest above the line between its ends, both axes scaled to
    the same length (Kneedle, Satopaa et al. 2011).  A timeline shows who held which slot when,
    one panel per trace.
    """
    figure.check_path(output)
    drawn = _draw([read(path) for path in files], latency, title)
    figure.save(drawn, output)
    click.echo(output)


def _draw(contents: list[SweepFile | TraceFile], latency: str, title: str) -> Any:
    sweeps = [one for one in contents if isinstance(one, SweepFile)]
    traces = [one for one in contents if isinstance(one, TraceFile)]
    if sweeps and traces:
        raise ValueError(
            f"{len(sweeps)} of the files are sweeps and {len(traces)} are traces; draw one kind in "
            "a picture"
        )
    if sweeps:
        curves = [curve.curve(one.label, one.rows, latency) for one in sweeps]
        return curve.draw(curves, latency, title)
    panels = [timeline.timeline(one.label, one.num_slots, one.steps) for one in traces]
    return timeline.draw(panels, title)

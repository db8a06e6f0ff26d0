"""The command: environments, models, engines in turns, and what is written.

Knows options and the order of things.  Does not know how any of it is done.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.peers.engines import PEERS, WEIGHTS, line_up, ours
from benchmarks.peers.report import markdown
from benchmarks.peers.run import ROOT, Run
from benchmarks.peers.work import items, small_items
from jaxserve.cli.options import IntList
from jaxserve.files import cache_directory
from jaxserve.loading.demo import fetch_demo_model


def say(text: str) -> None:
    """Progress, for people."""
    click.echo(text, err=True)


class Assignment(click.ParamType[tuple[str, str]]):
    """NAME=VALUE."""

    name = "NAME=PATH"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Split at the first "="."""
        if isinstance(value, tuple):
            return value
        name, equals, rest = str(value).partition("=")
        if not (name and equals and rest):
            self.fail(f"{value!r} is not of the form NAME=PATH", param, ctx)
        return name, rest


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option(
    "--ours",
    "interpreters",
    type=Assignment(),
    multiple=True,
    help="Label and interpreter to run this project on; this one if absent.  Repeatable.",
)
@click.option(
    "--peer", "peers", type=click.Choice(PEERS), multiple=True, default=PEERS, help="Repeatable."
)
@click.option(
    "--weights", type=click.Choice(WEIGHTS), multiple=True, default=WEIGHTS, help="Repeatable."
)
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Turns of each engine.")
@click.option(
    "--few-repeats", type=click.IntRange(min=1), default=2, help="The same of transformers."
)
@click.option("--fixed-slots", type=IntList(), default="1,8,16,32", help="Fixed work; at most 32.")
@click.option("--ragged-slots", type=IntList(), default="16,32", help="Ragged work.")
@click.option("--model", metavar="GGUF", help="The demo model's file; fetched if absent.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / ".peers",
    show_default=".peers",
    help="Where environments, models and logs are kept.",
)
@click.option(
    "--environment",
    "environments",
    type=Assignment(),
    multiple=True,
    help="A peer and the directory of an environment that has it; it is not made then.",
)
@click.option(
    "--python", default=sys.executable, show_default="this one", help="To make environments with."
)
@click.option("--reference/--no-reference", default=True, help="Compare tokens with float32.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "docs" / "benchmarks",
    show_default="docs/benchmarks",
    help="Where cpu.json, cpu.md and cpu.png are written.",
)
@click.option("--redraw", is_flag=True, help="Only write page and picture again, from cpu.json.")
@click.option("--small", is_flag=True, help="A minute: this project only, page to stdout.")
def main(
    interpreters: tuple[tuple[str, str], ...],
    peers: tuple[str, ...],
    weights: tuple[str, ...],
    repeats: int,
    few_repeats: int,
    fixed_slots: tuple[int, ...],
    ragged_slots: tuple[int, ...],
    model: str | None,
    directory: Path,
    environments: tuple[tuple[str, str], ...],
    python: str,
    reference: bool,
    output: Path,
    redraw: bool,
    small: bool,
) -> None:
    """Measure jaxserve beside other engines on this CPU, in turns, in one run.

    Let the machine be quiet: turns in which others computed are marked.
    """
    if redraw:
        write_pages(json.loads((output / "cpu.json").read_text(encoding="utf-8")), output)
        return
    if max(fixed_slots) > 32:
        raise click.UsageError(f"--fixed-slots {max(fixed_slots)}: there are 32 requests")
    pythons = dict(interpreters) or {"py{}{}".format(*sys.version_info): sys.executable}
    work = small_items() if small else items(fixed_slots, ragged_slots)
    engines = line_up(list(pythons), () if small else peers, ("bf16",) if small else weights)
    gguf = Path(model) if model else fetch_demo_model(cache_directory(None))
    run = Run(pythons, dict(environments), directory, python, gguf, say)
    base = ours(next(iter(pythons)), "f32")
    run.prepare([base, *engines])
    tokens = run.reference(base, work) if reference and not small else {}
    repeats = 1 if small else repeats
    try:
        run.measure(engines, work, repeats=repeats, few=few_repeats, reference=tokens)
    finally:  # what was found before an interruption is kept
        doc = run.document(engines, work, repeats)
        write_record(doc, directory)
    if small:
        click.echo(markdown(doc, None))
        return
    write_record(doc, output)
    write_pages(doc, output)


def write_record(doc: dict[str, Any], directory: Path) -> None:
    """Every number, as cpu.json."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cpu.json").write_text(json.dumps(doc, indent=1) + "\n", encoding="utf-8")


def write_pages(doc: dict[str, Any], output: Path) -> None:
    """The picture, if there is matplotlib, and the page."""
    from benchmarks.peers.plot import draw

    plot: str | None = "cpu.png"
    try:
        draw(doc, output / "cpu.png")
    except ImportError:
        say("no picture: it needs matplotlib (pip install -e '.[plot]')")
        plot = None
    (output / "cpu.md").write_text(markdown(doc, plot), encoding="utf-8")

"""`jaxserve fetch`: have the demo model on disk, ready for use without a network."""

from __future__ import annotations

import click

from jaxserve.cli.base import Verb, log_option


@click.command("fetch", cls=Verb)
@click.option("--cache-dir", metavar="DIR", help="Where to keep it; the user's cache if absent.")
@log_option
def command(cache_dir: str | None) -> None:
    """Fetch the demo model SmolLM2-135M-Instruct, unless it is there, and print its path."""
    from jaxserve.files import cache_directory
    from jaxserve.loading.demo import fetch_demo_model

    click.echo(fetch_demo_model(cache_directory(cache_dir)))

"""`jaxserve convert`: a model in any format that loads, into one that loads fast."""

from __future__ import annotations

import click

from jaxserve.cli.base import Verb, log_option
from jaxserve.config import DTYPES, LOAD_FORMATS


@click.command("convert", cls=Verb)
@click.argument("src")
@click.argument("dst")
@click.option(
    "--to",
    type=click.Choice(["hf", "orbax"]),
    default="hf",
    help="Hugging Face directory (safetensors) or Orbax checkpoint.",
)
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="auto", help="Of the weights; auto is bfloat16."
)
@click.option(
    "--load-format", type=click.Choice(LOAD_FORMATS), default="auto", help="How to read SRC."
)
@click.option("--cache-dir", metavar="DIR", help="As for the other verbs.")
@log_option
def command(
    src: str, dst: str, to: str, dtype: str, load_format: str, cache_dir: str | None
) -> None:
    """Convert the model SRC into the new directory DST, its tokenizer included.

    `jaxserve convert "$(jaxserve fetch)" DIR` converts the demo model.
    """
    from jaxserve.loading.convert import convert

    convert(src, dst, to, dtype, load_format=load_format, cache_dir=cache_dir)
    click.echo(dst)

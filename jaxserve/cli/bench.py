"""`jaxserve bench`: the group of measuring verbs."""

from __future__ import annotations

import click

from jaxserve.cli.base import LazyGroup


@click.group(
    "bench",
    cls=LazyGroup,
    verbs={
        "serve": "jaxserve.cli.bench_serve",
        "throughput": "jaxserve.cli.bench_throughput",
        "sweep": "jaxserve.cli.bench_sweep",
        "kernels": "jaxserve.cli.bench_kernels",
        "host": "jaxserve.cli.bench_host",
        "startup": "jaxserve.cli.bench_startup",
    },
)
def command() -> None:
    """Measure a server, the engine and its kernels."""

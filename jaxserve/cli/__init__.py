"""The `jaxserve` command: a group whose verbs are imported when they are called.

Knows the verbs' names.  Each verb is a module of this package with a `command`; none imports jax
before it runs.
"""

from __future__ import annotations

import click

from jaxserve.cli.base import LazyGroup


@click.group(
    cls=LazyGroup,
    verbs={
        "serve": "jaxserve.cli.serve",
        "generate": "jaxserve.cli.generate",
        "chat": "jaxserve.cli.chat",
        "score": "jaxserve.cli.score",
        "run-batch": "jaxserve.cli.run_batch",
        "bench": "jaxserve.cli.bench",
        "plot": "jaxserve.cli.plot",
        "tune": "jaxserve.cli.tune",
        "simulate": "jaxserve.cli.simulate",
        "convert": "jaxserve.cli.convert",
        "inspect": "jaxserve.cli.inspect",
        "fetch": "jaxserve.cli.fetch",
        "collect-env": "jaxserve.cli.collect_env",
    },
    context_settings={
        "auto_envvar_prefix": "JAXSERVE",
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(package_name="jaxserve", message="%(prog)s %(version)s")
def main() -> None:
    """Serve language models with JAX: continuous batching over a paged KV cache.

    Without --model every verb uses the demo model, SmolLM2-135M-Instruct, fetched once.  Any
    option can be given as an environment variable, JAXSERVE_<VERB>_<OPTION>, or in the YAML file
    of --config; a flag wins over the environment, and that over the file.

    Results go to stdout and everything else to stderr.  Exit code: 0 if all is well, 1 if
    something failed, 2 for wrong usage, 130 after Ctrl-C.
    """

"""`jaxserve serve`: the OpenAI-compatible server on the command line.

Knows flags and the exit code.  `jaxserve.server` does the work.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import replace
from typing import Any

import click

from jaxserve.cli.base import Decorated, Verb, log_option
from jaxserve.cli.options import engine_options, field_option
from jaxserve.config import EngineConfig
from jaxserve.server.config import ServerConfig

_REPEATABLE = {"served_model_name": "NAME", "allowed_origins": "ORIGIN"}
"""Fields that hold several values, and what one of them is called."""


def server_options(function: Decorated) -> Decorated:
    """Add a flag per field of ServerConfig; the verb gets them by name."""
    hints = typing.get_type_hints(ServerConfig)
    for field in reversed(dataclasses.fields(ServerConfig)):
        text = field.metadata["help"]
        if field.name in _REPEATABLE:
            function = click.option(
                f"--{field.name.replace('_', '-')}",
                metavar=_REPEATABLE[field.name],
                multiple=True,
                help=f"{text}  Repeatable.",
            )(function)
        else:
            hint = hints[field.name]
            function = field_option(field, hint, help=text, section="Options")(function)
    return function


@click.command("serve", cls=Verb)
@click.argument("model_argument", metavar="[MODEL]", required=False)
@server_options
@log_option
@engine_options()
def command(model_argument: str | None, config: EngineConfig, **server: Any) -> None:
    """Serve a model over HTTP, as OpenAI's API and vLLM's extensions of it.

    MODEL is what --model takes.  Chat and text completions are at /v1/chat/completions and
    /v1/completions; /metrics is for Prometheus, / for a browser.  A line on stderr says when and
    where the server listens.

    SIGTERM and Ctrl-C let running requests end within --drain-timeout-s, during which /ready is
    503 and new requests are refused; a second signal stops at once.

    Exit code: 0 if all requests that had begun were answered, 1 if some were cut or something
    failed.
    """
    if model_argument is not None:
        if config.model not in (None, model_argument):
            raise ValueError(f"both {model_argument!r} and --model {config.model!r}; give one")
        config = replace(config, model=model_argument)
    if not serve(config, ServerConfig(**server)):
        raise click.exceptions.Exit(1)


def serve(config: EngineConfig, server: ServerConfig) -> bool:
    """Load the model and serve it; false if requests had to be cut."""
    from jaxserve.server.run import bind

    with bind(server) as listening:
        from jaxserve.protocol.answer_format import AnswerFormat

        AnswerFormat.check(server.response_template)
        from jaxserve.async_llm import AsyncLLM
        from jaxserve.server.app import make_app
        from jaxserve.server.metrics import Metrics
        from jaxserve.server.run import serve as run

        llm = AsyncLLM(config=config)
        name = (server.served_model_name or (llm.model_name,))[0]
        answer_format = AnswerFormat.choose(server.response_template, llm.tokenizer)
        app = make_app(llm, server, Metrics(name), answer_format)
        return run(app, server, listening, _announce)


def _announce(url: str) -> None:
    click.echo(f"listening on {url}", err=True)

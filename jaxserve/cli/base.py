"""How verbs are found, and how their errors and logs reach the user.

Knows click.  Does not know any verb.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from jaxserve.config import LOG_LEVELS

log = logging.getLogger("jaxserve")

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class LazyGroup(click.Group):
    """A group that imports the module of a verb when the verb is asked for.

    Args:
        verbs: verb to module; the module's `command` is the verb.
    """

    def __init__(self, *args: Any, verbs: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._verbs = verbs

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order of their table."""
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a verb; None if there is no such."""
        if cmd_name not in self._verbs:
            return None
        command = importlib.import_module(self._verbs[cmd_name]).command
        assert isinstance(command, click.Command)
        return command


def one_line(error: Exception) -> click.ClickException:
    """The error as click shows it, "Error: ..." on stderr and exit code 1, on a single line."""
    return click.ClickException(" ".join(str(error).split()))


class SectionOption(click.Option):
    """An option that the help lists under a heading of its own."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Verb(click.Command):
    """A command that reports bad input in one line and exits with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; ValueError and OSError are the user's to see, anything else a bug."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader has gone; click ends quietly
        except KeyboardInterrupt:
            raise click.exceptions.Exit(128 + signal.SIGINT) from None
        except (ValueError, OSError) as error:
            log.debug("the error below in full", exc_info=True)
            raise one_line(error) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verb's own options, then each section."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                title = param.section if isinstance(param, SectionOption) else "Options"
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class _EchoHandler(logging.Handler):
    """Writes log lines to whatever stderr is at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # who reads stderr may go: that ends no program
            click.echo(self.format(record), err=True)


def _set_log_level(ctx: click.Context, param: click.Parameter, level: str) -> str:
    logger = logging.getLogger("jaxserve")
    logger.setLevel(level.upper())
    if not any(isinstance(handler, _EchoHandler) for handler in logger.handlers):
        handler = _EchoHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    return level


def log_option(function: Decorated) -> Decorated:
    """Add `--log-level`, which takes effect before the verb runs."""
    return click.option(
        "--log-level",
        type=click.Choice(LOG_LEVELS),
        default="info",
        expose_value=False,
        callback=_set_log_level,
        help="Least severe messages to show on stderr.",
    )(function)

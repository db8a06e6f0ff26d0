"""`jaxserve chat`: a conversation on the terminal, or from a pipe, line by line.

Knows the history and the commands.  Does not know the chat template.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import TYPE_CHECKING

import click

from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.interrupt import Interrupt
from jaxserve.cli.model import load_llm
from jaxserve.cli.options import engine_options
from jaxserve.cli.sampling import sampling_options
from jaxserve.config import EngineConfig
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

log = logging.getLogger(__name__)

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it; Ctrl-C stops an answer"


@click.command("chat", cls=Verb)
@click.option("--system", metavar="TEXT", help="System message to begin with.")
@log_option
@sampling_options(max_tokens=None)
@engine_options(without=["seed"], warm_up=False)
def command(system: str | None, params: SamplingParams, config: EngineConfig) -> None:
    """Talk to the model; it remembers the conversation.

    /reset forgets the conversation, /exit (or the end of the input) leaves.  Ctrl-C stops the
    answer, of which the conversation keeps what was said.  With input from a pipe each line is a
    message.
    """
    if params.n != 1:
        raise ValueError(f"n={params.n}: a conversation has one answer per message")
    llm = load_llm(config)
    conversation = Conversation(llm, params, system)
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing for input())

        click.echo(HELP, err=True)
    while (message := _read()) is not None:
        if message == "/reset":
            conversation.reset()
        elif message == "/exit":
            return
        elif message:
            conversation.say(message)


def _read() -> str | None:
    """The next message, stripped; None at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except EOFError:
        click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        return ""


class Conversation:
    """The messages so far, and the model that answers the next one."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)

    def say(self, message: str) -> None:
        """Print the answer to `message` as it is made, and remember both.

        A message that cannot be answered, such as one that fills the context, is reported and
        forgotten.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        try:
            token_ids = self._llm.tokenizer.encode_chat(asked)
            request_id = self._llm.engine.submit(token_ids, self._params)
        except ValueError as error:
            log.error("%s (/reset starts afresh)", error)
            return
        answer = self._answer(request_id)
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _answer(self, request_id: str) -> str:
        engine = self._llm.engine
        with Interrupt(signal.SIGINT) as interrupt:
            while engine.has_work and not interrupt:
                for delta in engine.step():
                    if delta.text:
                        click.echo(delta.text, nl=False)
        if interrupt:
            engine.abort(request_id)
        output = engine.take(request_id)
        click.echo()
        if output.error is not None:
            log.error("the answer ended early: %s", output.error)
        return output.outputs[0].text

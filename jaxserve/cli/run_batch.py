"""`jaxserve run-batch`: OpenAI Batch files on the command line.

Knows the progress bar and the exit codes.  `batch_file.py` and `batch_run.py`, or with a server
`batch_remote.py`, do the work.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from jaxserve.batch_file import BatchJob
from jaxserve.batch_run import run_batch
from jaxserve.batch_writer import BatchReport
from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.interrupt import Interrupt
from jaxserve.cli.model import load_llm, model_name
from jaxserve.cli.options import engine_options
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.llm import LLM
    from jaxserve.remote import RemoteServer

log = logging.getLogger(__name__)


@click.command("run-batch", cls=Verb)
@click.option("-i", "--input", "input", required=True, metavar="FILE", help="Lines of requests.")
@click.option("-o", "--output", "output", required=True, metavar="FILE", help="Where results go.")
@click.option("--resume", is_flag=True, help="Continue an output file that exists.")
@click.option(
    "--served-model-name",
    metavar="NAME",
    help='The only "model" that lines may name; the model\'s file name, or the first that the '
    "server lists, if absent.",
)
@click.option(
    "--response-template",
    metavar="TEMPLATE",
    help="How the model writes reasoning and tool calls: a JSON file, the name of a built-in "
    "template, or none; if absent what comes with the model. A server has its own.",
)
@click.option("--url", help="Ask a running server instead; the engine options do nothing then.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="For that server.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=64,
    help="Most requests at that server at once.",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=20.0,
    help="Seconds for which a line is asked again while that server does not answer it.",
)
@log_option
@engine_options()
def command(
    input: str,
    output: str,
    resume: bool,
    served_model_name: str | None,
    response_template: str | None,
    url: str | None,
    api_key: str | None,
    concurrency: int,
    patience: float,
    config: EngineConfig,
) -> None:
    """Answer an OpenAI Batch file.

    Each line is {"custom_id", "method": "POST", "url": "/v1/completions" or
    "/v1/chat/completions", "body"}.  Each gets one line of output, written as soon as it is
    known, so in no fixed order: match by custom_id, or for lines without one by error.line.
    Duplicate custom_ids are refused before anything is run; any other bad line gets an error
    record and the rest goes on.

    --resume keeps the answers of the output file and runs the lines without one: new ones, failed
    ones, and ones whose body has changed (the old answer moves to OUTPUT.superseded).  A finished
    job is left as it is, without loading the model.

    With --url a running server answers.  Its refusals (429, 503) are waited out; if it is gone, the
    run ends with code 1, and the lines without an answer have no record.

    Exit code: 0 if every line has an answer, 1 if any failed, 130 after Ctrl-C and 143 after
    SIGTERM; the output can then be resumed.
    """
    from tqdm import tqdm

    if response_template is not None:
        from jaxserve.protocol.answer_format import AnswerFormat

        AnswerFormat.check(response_template)
    server = None if url is None else _server(url, api_key)
    model = served_model_name or (model_name(config) if server is None else _model_of(server))
    job = BatchJob.open(input, output, model, resume=resume)
    total = len(job.lines) + len(job.answered)
    if not job.lines and job.is_clean:
        job.start().close()  # an empty input has an empty output
        log.info("all %d lines are answered; nothing to do", total)
        return
    interrupt = Interrupt(signal.SIGINT, signal.SIGTERM)
    with tqdm(total=total, initial=len(job.answered), unit="line", disable=None) as bar:
        settings: dict[str, Any] = {"on_record": bar.update, "should_stop": lambda: bool(interrupt)}
        if server is None:
            settings["response_template"] = response_template
            report = _run_here(job, config, interrupt, settings)
        else:
            settings["concurrency"] = concurrency
            report = _run_there(job, server, patience, interrupt, settings)
    log.info(
        "%d of %d lines answered, %d of them before",
        report.num_answered + len(job.answered),
        total,
        len(job.answered),
    )
    if report.num_failed:
        log.warning("%d lines failed; their records have an error", report.num_failed)
    if report.interrupted:
        log.warning("interrupted; continue with --resume")
        raise click.exceptions.Exit(128 + (interrupt.signum or 0))
    if report.num_failed:
        raise click.exceptions.Exit(1)


def _run_here(
    job: BatchJob, config: EngineConfig, interrupt: Interrupt, settings: dict[str, Any]
) -> BatchReport:
    with ExitStack() as stack:

        def load() -> LLM:
            llm = load_llm(config)
            # Until here a signal ends the program at once; from here on, between two steps.
            stack.enter_context(interrupt)
            return llm

        # Twice the slots: a freed slot then always finds a request waiting.
        return run_batch(job, load, max_in_engine=2 * config.max_num_seqs, **settings)


def _run_there(
    job: BatchJob,
    server: RemoteServer,
    silent_s: float,
    interrupt: Interrupt,
    settings: dict[str, Any],
) -> BatchReport:
    from jaxserve.batch_remote import Patience, run_remote

    with interrupt:
        return run_remote(job, server, patience=Patience(silent_s=silent_s), **settings)


def _server(url: str, api_key: str | None) -> RemoteServer:
    from jaxserve.remote import RemoteServer

    # An answer comes in one piece, after all of its tokens and the wait for a slot.
    return RemoteServer(url=url, api_key=api_key, timeout_s=3600.0)


def _model_of(server: RemoteServer) -> str:
    from jaxserve.remote import first_model

    async def ask() -> str:
        async with server.client() as client:
            return await first_model(client)

    return asyncio.run(ask())

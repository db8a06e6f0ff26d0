"""`jaxserve run-batch`: OpenAI Batch files on the command line.

Knows the progress bar and the exit codes.  `batch_file.py` and `batch_run.py` do the work.
"""

from __future__ import annotations

import logging
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from jaxserve.batch_file import BatchJob
from jaxserve.batch_run import run_batch
from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.interrupt import Interrupt
from jaxserve.cli.model import load_llm, model_name
from jaxserve.cli.options import engine_options
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.llm import LLM

log = logging.getLogger(__name__)


@click.command("run-batch", cls=Verb)
@click.option("-i", "--input", "input", required=True, metavar="FILE", help="Lines of requests.")
@click.option("-o", "--output", "output", required=True, metavar="FILE", help="Where results go.")
@click.option("--resume", is_flag=True, help="Continue an output file that exists.")
@click.option(
    "--served-model-name",
    metavar="NAME",
    help='The only "model" that lines may name; the model\'s file name if absent.',
)
@log_option
@engine_options()
def command(
    input: str, output: str, resume: bool, served_model_name: str | None, config: EngineConfig
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

    Exit code: 0 if every line has an answer, 1 if any failed, 130 after Ctrl-C and 143 after
    SIGTERM; the output can then be resumed.
    """
    from tqdm import tqdm

    job = BatchJob.open(input, output, served_model_name or model_name(config), resume=resume)
    total = len(job.lines) + len(job.answered)
    if not job.lines and job.is_clean:
        log.info("all %d lines are answered; nothing to do", total)
        return
    interrupt = Interrupt(signal.SIGINT, signal.SIGTERM)
    with (
        ExitStack() as stack,
        tqdm(total=total, initial=len(job.answered), unit="line", disable=None) as bar,
    ):

        def load() -> LLM:
            llm = load_llm(config)
            # Until here a signal ends the program at once; from here on, between two steps.
            stack.enter_context(interrupt)
            return llm

        report = run_batch(
            job,
            load,
            # Twice the slots: a freed slot then always finds a request waiting.
            max_in_engine=2 * config.max_num_seqs,
            on_record=bar.update,
            should_stop=lambda: bool(interrupt),
        )
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

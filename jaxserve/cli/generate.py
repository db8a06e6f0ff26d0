"""`jaxserve generate`: prompts in, continuations out, all of them batched together.

Does not know how the engine batches; it submits everything and prints in the order of the prompts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec

from jaxserve.bench.report import make_report, summary_line
from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.model import load_llm
from jaxserve.cli.options import engine_options
from jaxserve.cli.prompts import Prompt, prompt_file_option, read_prompts
from jaxserve.cli.results import sample_json, sample_text
from jaxserve.cli.sampling import sampling_options
from jaxserve.config import EngineConfig
from jaxserve.drive import run_all
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.llm import LLM


@click.command("generate", cls=Verb)
@click.argument("prompts", nargs=-1)
@prompt_file_option
@click.option("--json", is_flag=True, help="One JSON object per sample and line, in prompt order.")
@click.option("--stats", is_flag=True, help="End with a line of throughput figures on stderr.")
@log_option
@sampling_options()
@engine_options(without=["seed"], warm_up=False)
def command(
    prompts: tuple[str, ...],
    prompt_file: str | None,
    json: bool,
    stats: bool,
    params: SamplingParams,
    config: EngineConfig,
) -> None:
    """Continue PROMPTS, or those of a file or of stdin.

    The text of a single prompt is written as it is made.  Each object of --json has prompt, text,
    token_ids, finish_reason and metrics (times in seconds); with -n above 1 there is one per
    sample, with its index.  A prompt that cannot be served ends the command before anything is
    computed.
    """
    wanted = read_prompts(prompts, prompt_file)
    llm = load_llm(config)
    streams = len(wanted) == 1 and params.n == 1 and not json
    request_ids = _submit(llm, wanted, params, whole=not streams)
    start = time.monotonic()
    if streams:
        outputs = [_stream(llm.engine, request_ids[0])]
    else:
        outputs = []
        for number, output in enumerate(_in_order(llm.engine, request_ids), start=1):
            outputs.append(output)
            _print(number, wanted[number - 1], output, params, json)
    if stats:
        report = make_report(outputs, time.monotonic() - start, llm.engine.stats())
        click.echo(summary_line(report), err=True)
    _fail_on_errors(outputs)


def _submit(llm: LLM, prompts: list[Prompt], params: SamplingParams, *, whole: bool) -> list[str]:
    request_ids = []
    for number, prompt in enumerate(prompts, start=1):
        token_ids = prompt.token_ids
        if token_ids is None:
            token_ids = llm.tokenizer.encode(prompt.text or "")
        try:
            request_id = llm.engine.submit(
                token_ids, params, prompt=prompt.text, priority=prompt.priority, whole=whole
            )
            request_ids.append(request_id)
        except ValueError as error:
            where = f"prompt {number}: " if len(prompts) > 1 else ""
            raise ValueError(f"{where}{error}") from error
    return request_ids


def _stream(engine: Engine, request_id: str) -> RequestOutput:
    while engine.has_work:
        for delta in engine.step():
            if delta.text:
                click.echo(delta.text, nl=False)
    click.echo()
    return engine.take(request_id)


def _in_order(engine: Engine, request_ids: list[str]) -> Iterator[RequestOutput]:
    """Yield each output as soon as it and all before it are finished."""
    finished: dict[str, RequestOutput] = {}
    position = 0
    for output in run_all(engine):
        finished[output.request_id] = output
        while position < len(request_ids) and request_ids[position] in finished:
            yield finished.pop(request_ids[position])
            position += 1


def _print(
    number: int, prompt: Prompt, output: RequestOutput, params: SamplingParams, json: bool
) -> None:
    for sample in output.outputs:
        if json:
            record = sample_json(output, sample, with_index=params.n > 1)
            click.echo(msgspec.json.encode(record))
        else:
            name = f"{number}" if params.n == 1 else f"{number}.{sample.index}"
            click.echo(sample_text(name, prompt.text, output, sample))


def _fail_on_errors(outputs: list[RequestOutput]) -> None:
    failed = [o for o in outputs if any(s.finish_reason == "error" for s in o.outputs)]
    if failed:
        raise ValueError(
            f"{len(failed)} of {len(outputs)} prompts ended with an error: {failed[0].error}"
        )

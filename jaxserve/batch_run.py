"""Answer the lines of a batch file with an engine, a bounded number of requests at a time.

Knows how a line becomes engine requests.  Does not know which lines are pending (`batch_file.py`),
or the command line.  A line that fails costs a record, never the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxserve.batch_file import BatchJob, Line
from jaxserve.batch_line import LineRequest
from jaxserve.batch_writer import BatchReport, BatchWriter
from jaxserve.drive import take_finished
from jaxserve.outputs import RequestOutput
from jaxserve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Prompt,
    RequestError,
    failed_output,
    response_body,
)

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.llm import LLM
    from jaxserve.protocol.answer_format import AnswerFormat
    from jaxserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def run_batch(
    job: BatchJob,
    load: Callable[[], LLM],
    *,
    max_in_engine: int,
    response_template: str | None = None,
    on_record: Callable[[], object] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> BatchReport:
    """Answer every pending line of `job`.

    Args:
        job: an opened job.
        load: makes the model; called only if a line needs it.
        max_in_engine: most samples submitted and unfinished at once.  One line with more than
            that runs alone.
        response_template: how the model writes reasoning and tool calls; see
            `AnswerFormat.choose`.
        on_record: called after each record written.
        should_stop: asked between steps; true ends the run early, leaving a resumable file.

    Raises:
        OSError: the output cannot be written.
    """
    with job.start() as output:
        writer = BatchWriter(output, on_record)
        for line, error in job.failures():
            writer.fail(line, error)
        if any(line.is_valid for line in job.lines):
            from jaxserve.protocol.answer_format import AnswerFormat

            llm = load()
            answer_format = AnswerFormat.choose(response_template, llm.tokenizer)
            run = _Run(llm.engine, llm.tokenizer, job.model, writer, answer_format)
            writer.report.interrupted = run.answer(job.requests(), max_in_engine, should_stop)
        return writer.report


@dataclass(slots=True)
class _Active:
    """A line whose prompts are in the engine."""

    line: Line
    parsed: LineRequest
    prompts: list[Prompt]
    num_samples: int
    request_ids: list[str] = field(default_factory=list)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)


class _Run:
    """The lines in the engine, by the ids of their requests."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        model: str,
        writer: BatchWriter,
        answer_format: AnswerFormat | None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._model = model
        self._writer = writer
        self._answer_format = answer_format
        self._active: dict[str, _Active] = {}
        self._num_samples = 0

    def answer(
        self,
        requests: Iterator[tuple[Line, LineRequest]],
        max_in_engine: int,
        should_stop: Callable[[], bool],
    ) -> bool:
        """Submit and step until all lines have a record; true if stopped before that."""
        waiting = next(requests, None)
        while waiting is not None or self._active:
            if should_stop():
                self._drop(self._active)
                break
            while waiting is not None and (not self._active or self._num_samples < max_in_engine):
                self._submit(*waiting)
                waiting = next(requests, None)
            if self._active:
                for output in take_finished(self._engine, self._engine.step()):
                    self._finish(output)
        is_stopped = waiting is not None or bool(self._active)
        self._active.clear()
        while self._engine.has_work:  # a step that was in flight when the last request ended
            self._engine.step()
        return is_stopped

    def _submit(self, line: Line, parsed: LineRequest) -> None:
        active = None
        try:
            _refuse_timeout(parsed.request)
            prompts = parsed.request.prompts(self._tokenizer)
            params = parsed.request.sampling_params(self._answer_format, prompts)
            active = _Active(line, parsed, prompts, params.n * len(prompts))
            for index, prompt in enumerate(prompts):
                request_id = self._engine.submit(
                    prompt.token_ids,
                    params,
                    request_id=f"batch-{line.number}-{index}",
                    prompt=prompt.text,
                    priority=parsed.request.priority or 0,
                    key=parsed.request.user or "",
                    whole=True,
                )
                active.request_ids.append(request_id)
        except Exception as error:  # a chat template may raise anything
            self._refuse(line, parsed, active, error)
        else:
            self._active.update(dict.fromkeys(active.request_ids, active))
            self._num_samples += active.num_samples

    def _refuse(
        self, line: Line, parsed: LineRequest, active: _Active | None, error: Exception
    ) -> None:
        if active is not None:
            self._drop(active.request_ids)
        if isinstance(error, ValueError):
            self._writer.fail(line, parsed.request.blame(error))
        else:
            log.error("line %d", line.number, exc_info=error)
            message = f"{type(error).__name__}: {error}"
            self._writer.fail(line, RequestError(message, None, "server_error", 500))

    def _drop(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
            self._engine.take(request_id)

    def _finish(self, output: RequestOutput) -> None:
        active = self._active.pop(output.request_id)
        active.outputs[output.request_id] = output
        if len(active.outputs) < len(active.request_ids):
            return
        self._num_samples -= active.num_samples
        outputs = [active.outputs[request_id] for request_id in active.request_ids]
        for one in outputs:
            error = failed_output(one, active.parsed.request.blame)
            if error is not None:
                self._writer.fail(active.line, error)
                return
        body = response_body(
            active.parsed.request,
            active.prompts,
            outputs,
            self._tokenizer,
            response_id=f"{active.parsed.request_id.removeprefix('req_')}-{active.line.number}",
            model=self._model,
            created=int(time.time()),
            answer_format=self._answer_format,
        )
        self._writer.answer(active.line, body)


def _refuse_timeout(request: CompletionRequest | ChatCompletionRequest) -> None:
    """A line has no arrival from which its deadline could count."""
    if request.timeout is not None:
        raise RequestError(
            f"timeout={request.timeout} is for requests to a server; leave it out", "timeout"
        )

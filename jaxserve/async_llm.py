"""The engine for asyncio programs: submit, stream and abort while it runs on its own thread.

Knows both sides of the boundary.  The engine belongs to the thread (`engine_thread.py`), answers
to the event loop (`answer.py`); between them go jobs one way and, once per step, results the
other way.  There is one way to end a request early: a job that aborts and takes it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.answer import Answer, PromptLogprobs
from jaxserve.drive import take_finished
from jaxserve.engine_thread import EngineThread
from jaxserve.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.llm import LLM
    from jaxserve.models.config import ModelConfig
    from jaxserve.tokenizer import Tokenizer

DEADLINE = "deadline"
"""`stop_reason` of what ended, with reason "length", because its time was up."""
_ABORT = "abort"

Result = TypeVar("Result")


class EngineDeadError(RuntimeError):
    """The engine's thread has ended: no request can be served any more."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request for `AsyncLLM.submit_all`; see `Engine.submit`."""

    prompt_token_ids: Seq[int]
    params: SamplingParams
    request_id: str | None = None
    prompt: str | None = None
    priority: int = 0
    key: str = ""


class AsyncLLM:
    """A model that answers any number of coroutines of one event loop at a time.

    Args:
        model: as for `LLM`.
        config: a whole configuration; `options` then override its fields.
        options: fields of `EngineConfig` by name.

    Raises:
        ValueError: the model or an option cannot be; one line with the remedy.
    """

    def __init__(
        self, model: str | None = None, *, config: EngineConfig | None = None, **options: Any
    ) -> None:
        """Load the model and compile or load every executable; the thread starts on first use."""
        from jaxserve.llm import LLM

        self._take_over(LLM(model, config=config, **options))

    @classmethod
    def over(cls, llm: LLM) -> AsyncLLM:
        """Serve a model that is loaded already; from now on nothing else may use it.

        Args:
            llm: anything with the engine, tokenizer, configurations and name of an `LLM`.
        """
        self = cls.__new__(cls)
        self._take_over(llm)
        return self

    def _take_over(self, llm: LLM) -> None:
        self.engine: Engine = llm.engine
        """Read it only: its methods belong to the thread.  See `call`."""
        self.tokenizer: Tokenizer = llm.tokenizer
        self.config: EngineConfig = llm.config
        self.model_config: ModelConfig = llm.model_config
        self.model_name: str = llm.model_name
        self._close_model = llm.close
        self._thread = EngineThread(self.engine, self._on_deltas, self._on_death)
        self._started = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fresh_ids = (f"request-{n}" for n in itertools.count(1))
        # The loop's.
        self._answers: dict[str, Answer] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._num_submitting = 0
        # The thread's: requests whose prompt log-probabilities the loop has not seen.
        self._scored: set[str] = set()

    @property
    def is_alive(self) -> bool:
        """Requests are accepted: it was not closed and the engine has not failed."""
        return not self._closed and (not self._started or self._thread.is_alive)

    @property
    def error(self) -> BaseException | None:
        """What the engine died of, if it did."""
        return self._thread.error

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._answers)

    @property
    def num_waiting(self) -> int:
        """Samples that wait for a slot, those on their way to the engine included."""
        return self._num_submitting + self.engine.scheduler.num_waiting

    def start(self) -> None:
        """Start the engine's thread, if it is not running yet."""
        if not self._started:
            self._started = True
            self._thread.start()

    async def submit(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
        key: str = "",
        deadline_s: float | None = None,
    ) -> Answer:
        """Queue a request.

        Args:
            prompt_token_ids: at least one.
            params: how to sample, and when to end.
            request_id: its name; a fresh one if absent.
            prompt: the text, to be given back with the output.
            priority: lower first, under the policy "priority".
            key: whose it is, such as a user or tenant, for the fair share.
            deadline_s: seconds from now after which it ends with what it has: with finish reason
                "length" and stop reason "deadline".

        Raises:
            ValueError: as `Engine.submit`.
            EngineDeadError: the engine has failed, or was closed.
        """
        ask = Ask(
            prompt_token_ids=prompt_token_ids,
            params=params,
            request_id=request_id,
            prompt=prompt,
            priority=priority,
            key=key,
        )
        (answer,) = await self.submit_all([ask], deadline_s=deadline_s)
        return answer

    async def submit_all(self, asks: Seq[Ask], *, deadline_s: float | None = None) -> list[Answer]:
        """Queue several requests between the same two steps: all, or none if one is refused.

        The answers share their `changed`, so that one coroutine can wait for any of them.

        Args:
            asks: the requests.
            deadline_s: for each of them; see `submit`.

        Raises:
            ValueError: as `Engine.submit`, of the first that is refused.
            EngineDeadError: the engine has failed, or was closed.
        """
        loop = self._bind()
        until = None if deadline_s is None else loop.time() + deadline_s
        changed = asyncio.Event()
        named = [replace(ask, request_id=ask.request_id or self._fresh_id()) for ask in asks]
        self._check_ids(named)
        answers = {
            str(ask.request_id): Answer(str(ask.request_id), changed, self._abort) for ask in named
        }
        self._answers |= answers
        num_samples = sum(ask.params.n for ask in asks)
        self._num_submitting += num_samples
        try:
            await self._call(functools.partial(self._submit_now, named))
        except asyncio.CancelledError:
            for answer in answers.values():  # the job is on its way: this one follows it
                answer.abort()
            raise
        except BaseException:
            for request_id in answers:
                self._answers.pop(request_id, None)
            raise
        finally:
            self._num_submitting -= num_samples
        for answer in answers.values():
            if until is not None and not answer.ended:
                answer.expire_after(until - loop.time(), self._expire)
        return list(answers.values())

    async def generate(
        self,
        prompt: str | Mapping[str, Any] | Seq[int],
        sampling_params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        key: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; every output holds all that there is so far (vLLM's form).

        Args:
            prompt: text, `{"prompt": text}`, `{"prompt_token_ids": ids}` or the ids themselves.
            sampling_params: how to sample, and when to end.
            request_id: its name; a fresh one if absent.
            priority: lower first, under the policy "priority".
            key: whose it is, for the fair share.

        Yields:
            The state after each step that the reader is in time for, and the result at last.
            Closing the iterator aborts the request.

        Raises:
            ValueError: as `Engine.submit`.
            EngineDeadError: the engine has failed, or was closed.
        """
        text, ids = self._encode(prompt)
        answer = await self.submit(
            ids, sampling_params, request_id=request_id, prompt=text, priority=priority, key=key
        )
        async with answer:
            so_far = _SoFar(answer, text, ids, sampling_params)
            while not answer.ended:
                answer.changed.clear()
                await answer.changed.wait()
                deltas = answer.take()
                if deltas and not answer.ended:
                    yield so_far.add(deltas)
            yield await answer.result()

    async def abort(self, request_id: str) -> None:
        """End a request now, if it has not ended; its answer gets the reason "abort"."""
        if request_id in self._answers:
            self._answers[request_id].abort()

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run a function of the engine between two steps; it must be quick.

        Raises:
            EngineDeadError: the engine has failed, or was closed.
        """
        self._bind()
        return await self._call(function)

    async def close(self) -> None:
        """Abort what is left, end the thread and let go of what still loads."""
        if self._closed:
            return
        self._closed = True
        if self._started:
            ids = list(self._answers)
            last = functools.partial(self._end_now, ids, _ABORT, None)
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._thread.close, last)
            await asyncio.sleep(0)  # what the thread has posted comes first
            self._abandon(EngineDeadError("the engine was closed"), _ABORT)
        self._close_model()

    # The loop's side.

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Serve the running loop from now on."""
        if not self.is_alive:
            raise EngineDeadError(
                "the engine was closed"
                if self.error is None
                else f"the engine has failed: {type(self.error).__name__}: {self.error}"
            )
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed() and self._answers:
                raise RuntimeError("AsyncLLM serves one event loop at a time; this is another one")
            self._loop = loop
            self._answers, self._calls = {}, set()
        self.start()
        return loop

    def _fresh_id(self) -> str:
        return next(i for i in self._fresh_ids if i not in self._answers)

    def _check_ids(self, asks: Seq[Ask]) -> None:
        names = [str(ask.request_id) for ask in asks]
        taken = [name for name in names if name in self._answers or names.count(name) > 1]
        if taken:
            raise ValueError(f"request id {taken[0]!r} is in use; choose another")

    async def _call(self, function: Callable[[Engine], Result]) -> Result:
        assert self._loop is not None
        done: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(done)
        self._thread.do(functools.partial(self._run_call, function, done))
        try:
            return await done
        finally:
            self._calls.discard(done)

    def _abort(self, request_id: str) -> None:
        self._thread.do(functools.partial(self._end_now, [request_id], _ABORT, None))

    def _expire(self, request_id: str) -> None:
        self._thread.do(functools.partial(self._end_now, [request_id], "length", DEADLINE))

    def _deliver(
        self,
        deltas: Seq[Delta],
        outputs: Seq[RequestOutput],
        scores: Mapping[str, PromptLogprobs],
    ) -> None:
        """Hand what one step gave to the answers; an answer of an earlier loop is no more."""
        for request_id, logprobs in scores.items():
            if request_id in self._answers:
                self._answers[request_id].prompt_logprobs = logprobs
        for delta in deltas:
            answer = self._answers.get(delta.request_id)
            if answer is not None:
                answer.feed(delta)
        for output in outputs:
            answer = self._answers.pop(output.request_id, None)
            if answer is not None:
                answer.end(output)

    def _abandon(self, error: EngineDeadError, reason: str) -> None:
        """The thread has ended: so do all answers and calls that it still owes."""
        for done in self._calls:
            if not done.done():
                done.set_exception(error)
        for request_id in list(self._answers):
            try:
                output = self.engine.output(request_id)
            except ValueError:  # never submitted
                output = _nothing(request_id)
            if reason == "error":
                output.error = str(error)
            self._deliver(_end_samples(output, reason, None), [output], {})

    def _encode(self, prompt: str | Mapping[str, Any] | Seq[int]) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            prompt = prompt.get("prompt") or ""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, list(prompt)

    # The thread's side.

    def _submit_now(self, asks: Seq[Ask], engine: Engine) -> None:
        submitted: list[str] = []
        try:
            for ask in asks:
                request_id = engine.submit(
                    ask.prompt_token_ids,
                    ask.params,
                    request_id=ask.request_id,
                    prompt=ask.prompt,
                    priority=ask.priority,
                    key=ask.key,
                )
                submitted.append(request_id)
                if ask.params.prompt_logprobs is not None:
                    self._scored.add(request_id)
        except BaseException:
            for request_id in submitted:
                self._scored.discard(request_id)
                engine.abort(request_id)
                engine.take(request_id)
            raise

    def _run_call(self, function: Callable[[Engine], Any], done: asyncio.Future[Any]) -> None:
        try:
            result = function(self.engine)
        except Exception as error:
            self._post(_settle, done, None, error)
        else:
            self._post(_settle, done, result, None)

    def _end_now(self, request_ids: Seq[str], reason: str, stop_reason: str | None) -> None:
        """The one way to end requests early; what has ended before is left as it is."""
        deltas, outputs = [], []
        for request_id in request_ids:
            try:
                self.engine.abort(request_id)
            except ValueError:  # it has ended, or was refused
                continue
            output = self.engine.take(request_id)
            deltas += _end_samples(output, reason, stop_reason)
            outputs.append(output)
            self._scored.discard(request_id)
        if outputs:
            self._post(self._deliver, deltas, outputs, {})

    def _on_deltas(self, deltas: list[Delta]) -> None:
        outputs = list(take_finished(self.engine, deltas))
        scores: dict[str, PromptLogprobs] = {}
        if self._scored:
            taken = {output.request_id: output for output in outputs}
            for request_id in self._scored & {delta.request_id for delta in deltas}:
                output = taken.get(request_id) or self.engine.output(request_id)
                scores[request_id] = output.prompt_logprobs or []
            self._scored -= scores.keys()
        if not self._post(self._deliver, deltas, outputs, scores):
            for request_id in {delta.request_id for delta in deltas}:
                self._end_now([request_id], _ABORT, None)

    def _on_death(self, error: BaseException) -> None:
        dead = EngineDeadError(f"the engine has failed: {type(error).__name__}: {error}")
        self._post(self._abandon, dead, "error")

    def _post(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Run on the loop; false if it is gone."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True


class _SoFar:
    """Adds up deltas to outputs of a request that still runs."""

    def __init__(
        self, answer: Answer, text: str | None, ids: list[int], params: SamplingParams
    ) -> None:
        self._answer = answer
        self._prompt = (text, ids)
        self._metrics = RequestMetrics(arrival_time=time.monotonic())
        wants = params.logprobs is not None
        self._samples = [
            CompletionOutput(index, "", [], None, [] if wants else None, None)
            for index in range(params.n)
        ]

    def add(self, deltas: Seq[Delta]) -> RequestOutput:
        for delta in deltas:
            sample = self._samples[delta.index]
            sample.text += delta.text
            sample.token_ids += delta.token_ids
            if sample.logprobs is not None:
                sample.logprobs += delta.logprobs or ()
            sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason
        text, ids = self._prompt
        return RequestOutput(
            request_id=self._answer.request_id,
            prompt=text,
            prompt_token_ids=ids,
            prompt_logprobs=self._answer.prompt_logprobs,
            outputs=[
                replace(
                    sample,
                    token_ids=list(sample.token_ids),
                    logprobs=None if sample.logprobs is None else list(sample.logprobs),
                )
                for sample in self._samples
            ],
            finished=False,
            metrics=self._metrics,
        )


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Resolve a future, unless whoever waited has gone."""
    if not done.done():
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)


def _end_samples(output: RequestOutput, reason: str, stop_reason: str | None) -> list[Delta]:
    """Give the samples that were cut short their reason; the deltas that say so."""
    cut = [s for s in output.outputs if s.finish_reason in (None, _ABORT)]
    for sample in cut:
        sample.finish_reason, sample.stop_reason = reason, stop_reason
    output.finished = True
    return [Delta(output.request_id, s.index, "", (), reason, stop_reason) for s in cut]


def _nothing(request_id: str) -> RequestOutput:
    """The output of a request that the engine has never seen."""
    metrics = RequestMetrics(arrival_time=time.monotonic())
    sample = CompletionOutput(0, "", [], None, None, None)
    return RequestOutput(request_id, None, [], None, [sample], False, metrics)

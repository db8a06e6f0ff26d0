"""The engine for asyncio programs: submit, stream and abort while it runs on its own thread.

Knows both sides of the boundary.  The engine belongs to its thread (`engine_thread.py`,
`engine_requests.py`), answers to the event loop (`answer.py`); between them go jobs one way and,
once per step, results the other way.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from jaxserve.answer import Answer
from jaxserve.cumulative import Cumulative
from jaxserve.engine_requests import ABORT, Ask, Ending, EngineRequests, Results
from jaxserve.engine_thread import EngineThread
from jaxserve.outputs import Delta, RequestOutput
from jaxserve.prompt import Prompt, encode_prompt
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.engine import Engine
    from jaxserve.llm import LLM
    from jaxserve.models.config import ModelConfig
    from jaxserve.tokenizer import Tokenizer

DEADLINE = "deadline"
"""`stop_reason` of what ended, with reason "length", because its time was up."""

CLOSED = "the engine was closed"
NUM_COMPILERS = 2
"""Threads that compile grammars; the compiler lets others run meanwhile."""

Result = TypeVar("Result")


class EngineDeadError(RuntimeError):
    """The engine's thread has ended: no request can be served any more."""


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
        self._compilers = ThreadPoolExecutor(NUM_COMPILERS, "jaxserve-grammar")
        # The thread's.
        self._requests = EngineRequests(self.engine)

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
        num_samples = sum(ask.params.n for ask in asks)
        self._num_submitting += num_samples
        try:
            await self._compile(asks)
            self._bind()  # the engine may have ended meanwhile
            answers = await self._submit(asks)
        finally:
            self._num_submitting -= num_samples
        for answer in answers:
            if until is not None and not answer.ended:
                answer.expire_after(until - loop.time(), self._expire)
        return answers

    async def generate(
        self,
        prompt: Prompt,
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
        text, ids = encode_prompt(prompt, self.tokenizer)
        answer = await self.submit(
            ids, sampling_params, request_id=request_id, prompt=text, priority=priority, key=key
        )
        async with answer:
            so_far = Cumulative(answer, text, ids, sampling_params)
            while not answer.ended:
                deltas = answer.take()
                if deltas:
                    yield so_far.add(deltas)
                else:
                    answer.changed.clear()
                    await answer.changed.wait()
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
            last = functools.partial(self._end_now, list(self._answers), Ending(ABORT))
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, self._thread.close, last)
            await asyncio.sleep(0)  # what the thread has posted comes first
            self._abandon(Ending(ABORT), EngineDeadError(CLOSED))
        self._compilers.shutdown(wait=False)
        self._close_model()

    # The loop's side.

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Serve the running loop from now on."""
        if not self.is_alive:
            raise EngineDeadError(CLOSED if self.error is None else _failed(self.error))
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed() and self._answers:
                raise RuntimeError("AsyncLLM serves one event loop at a time; this is another one")
            self._loop = loop
            self.start()
            if self._answers:  # of a loop that is gone: nobody reads them
                left = list(self._answers)
                self._thread.do(functools.partial(self._end_now, left, Ending(ABORT)))
            self._answers, self._calls = {}, set()
        return loop

    async def _compile(self, asks: Seq[Ask]) -> None:
        """Have the grammars of constraints ready: a large one takes a second.

        Neither on the engine's thread nor on those of the loop's own executor, which others need.
        """
        assert self._loop is not None
        for ask in asks:
            constraint = ask.params.structured_outputs
            if isinstance(constraint, StructuredOutputsParams):
                await self._loop.run_in_executor(self._compilers, self._compile_one, constraint)

    def _compile_one(self, constraint: StructuredOutputsParams) -> None:
        if self.is_alive:  # else nobody needs it
            self.engine.grammars.compile(constraint)

    async def _submit(self, asks: Seq[Ask]) -> list[Answer]:
        """Hand requests to the engine's thread; the answers that it will feed."""
        changed = asyncio.Event()
        named = [replace(ask, request_id=ask.request_id or self._fresh_id()) for ask in asks]
        self._check_ids(named)
        answers = [Answer(str(ask.request_id), changed, self._abort) for ask in named]
        self._answers |= {answer.request_id: answer for answer in answers}
        try:
            await self._call(lambda _: self._requests.submit(named))
        except asyncio.CancelledError:
            for answer in answers:  # the job is on its way: these follow it
                answer.abort()
            self._thread.do(functools.partial(self._post, self._forget, answers))
            raise
        except BaseException:
            self._forget(answers)
            raise
        return answers

    def _forget(self, answers: Seq[Answer]) -> None:
        """Expect nothing more for answers, of which some have been delivered."""
        for answer in answers:
            if self._answers.get(answer.request_id) is answer:
                del self._answers[answer.request_id]

    def _fresh_id(self) -> str:
        return next(i for i in self._fresh_ids if i not in self._answers)

    def _check_ids(self, asks: Seq[Ask]) -> None:
        seen: set[str] = set()
        for ask in asks:
            request_id = str(ask.request_id)
            if request_id in self._answers or request_id in seen:
                raise ValueError(f"request id {request_id!r} is in use; choose another")
            seen.add(request_id)

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
        self._thread.do(functools.partial(self._end_now, [request_id], Ending(ABORT)))

    def _expire(self, request_id: str) -> None:
        ending = Ending("length", DEADLINE)
        self._thread.do(functools.partial(self._end_now, [request_id], ending))

    def _deliver(self, results: Results) -> None:
        """Hand results to the answers; those of an earlier loop are no more."""
        for request_id, logprobs in results.prompt_logprobs.items():
            if request_id in self._answers:
                self._answers[request_id].prompt_logprobs = logprobs
        for delta in results.deltas:
            answer = self._answers.get(delta.request_id)
            if answer is not None:
                answer.feed(delta)
        for output in results.outputs:
            answer = self._answers.pop(output.request_id, None)
            if answer is not None:
                answer.end(output)

    def _abandon(self, ending: Ending, error: EngineDeadError) -> None:
        """The thread has ended: so do all answers and calls that it still owes."""
        for done in self._calls:
            if not done.done():
                done.set_exception(error)
        reason = str(error) if ending.reason == "error" else None
        self._deliver(self._requests.bury(list(self._answers), ending, reason))

    # The thread's side.

    def _run_call(self, function: Callable[[Engine], Any], done: asyncio.Future[Any]) -> None:
        try:
            result = function(self.engine)
        except Exception as error:
            self._post(_settle, done, None, error)
        else:
            self._post(_settle, done, result, None)

    def _end_now(self, request_ids: Seq[str], ending: Ending) -> None:
        results = self._requests.end(request_ids, ending)
        if results.outputs:
            self._post(self._deliver, results)

    def _on_deltas(self, deltas: list[Delta]) -> None:
        results = self._requests.collect(deltas)
        if results and not self._post(self._deliver, results):
            self._requests.end([delta.request_id for delta in deltas], Ending(ABORT))

    def _on_death(self, error: BaseException) -> None:
        self._post(self._abandon, Ending("error"), EngineDeadError(_failed(error)))

    def _post(self, function: Callable[..., None], *arguments: Any) -> bool:
        """Run on the loop; false if it is gone."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Resolve a future, unless whoever waited has gone."""
    if not done.done():
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)


def _failed(error: BaseException) -> str:
    return f"the engine has failed: {type(error).__name__}: {error}"

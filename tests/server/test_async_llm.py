"""The engine on its thread, seen from asyncio; its steps are allowed one by one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.async_llm import AsyncLLM, EngineDeadError
from jaxserve.engine_requests import Ask
from tests.server.scripted import PATIENCE_S, ScriptedEngine, scripted_model

Test = Callable[[AsyncLLM, ScriptedEngine], Awaitable[None]]
A = [ord("a")]
FIVE = SamplingParams(max_tokens=5)


def run(test: Test) -> None:
    """Run a test against a new engine, which is closed after it."""

    async def within() -> None:
        engine = ScriptedEngine()
        llm = AsyncLLM.over(scripted_model(engine))
        try:
            await asyncio.wait_for(test(llm, engine), PATIENCE_S)
        finally:
            await llm.close()
        assert not engine.outputs, "nothing is left"

    asyncio.run(within())


def test_deltas_and_result() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        answer = await llm.submit(A, FIVE)
        engine.steps.release(5)
        deltas = [delta async for delta in answer]
        assert "".join(delta.text for delta in deltas) == "abcde"
        assert [delta.finish_reason for delta in deltas][-1] == "length"
        output = await answer.result()
        assert output.outputs[0].text == "abcde"
        assert answer.ended
        assert engine.thread not in (None, threading.current_thread())
        assert llm.num_live == 0

    run(test)


def test_what_nobody_reads_is_merged_and_nothing_is_lost() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        answer = await llm.submit(A, SamplingParams(max_tokens=9, n=2))
        engine.steps.release(9)
        await answer.result()
        deltas = answer.take()
        assert sorted(delta.index for delta in deltas) == [0, 1]
        for delta in deltas:
            assert delta.text == "abcdefghi"
            assert delta.token_ids == tuple(b"abcdefghi")
            assert delta.finish_reason == "length"
        assert answer.take() == []
        assert [delta async for delta in answer] == []

    run(test)


def test_refused_requests_raise_and_leave_nothing() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        with pytest.raises(ValueError, match="empty"):
            await llm.submit([], FIVE)
        asks = [Ask(prompt_token_ids=ids, params=FIVE) for ids in (A, [], A)]
        with pytest.raises(ValueError, match="empty"):
            await llm.submit_all(asks)
        assert llm.num_live == 0
        assert llm.num_waiting == 0
        assert await llm.call(lambda e: e.has_work) is False
        taken = await llm.submit(A, FIVE, request_id="mine")
        with pytest.raises(ValueError, match="'mine' is in use"):
            await llm.submit(A, FIVE, request_id="mine")
        same = [Ask(prompt_token_ids=A, params=FIVE, request_id="twin")] * 2
        with pytest.raises(ValueError, match="'twin' is in use"):
            await llm.submit_all(same)
        engine.steps.release(5)
        assert (await taken.result()).outputs[0].text == "abcde"

    run(test)


@pytest.mark.parametrize("way", ["abort", "abort by id", "aclose", "async with", "cancel"])
def test_ways_to_leave(way: str) -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        answer = await llm.submit(A, FIVE, request_id="x")
        engine.steps.release(2)
        text = ""
        while len(text) < 2:
            text += (await anext(answer)).text
        if way == "abort":
            answer.abort()
            answer.abort()
        elif way == "abort by id":
            await llm.abort("x")
            await llm.abort("never heard of")
        elif way == "aclose":
            await answer.aclose()
        elif way == "async with":
            async with answer:
                pass
        else:
            await leave_by_cancelling(answer)
        output = await answer.result()
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].text == text == "ab"
        (last,) = [delta async for delta in answer]
        assert last.finish_reason == "abort"

    run(test)


async def leave_by_cancelling(answer: Any) -> None:
    async def read() -> None:
        async with answer:
            async for _ in answer:
                pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_caller_who_leaves_while_submitting_leaves_nothing_behind() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        task = asyncio.create_task(llm.submit(A, FIVE))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while llm.num_live:
            await asyncio.sleep(0.001)
        assert await llm.call(lambda e: e.has_work) is False

    run(test)


def test_a_caller_who_leaves_before_being_refused_leaves_nothing_behind() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        busy = threading.Event()
        llm.start()
        await llm.call(lambda _: None)
        llm._thread.do(busy.wait)
        task = asyncio.create_task(llm.submit([], FIVE, request_id="mine"))
        while not llm.num_live:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        busy.set()
        while llm.num_live:
            await asyncio.sleep(0.001)
        answer = await llm.submit(A, FIVE, request_id="mine")
        engine.steps.release(5)
        assert (await answer.result()).outputs[0].text == "abcde"

    run(test)


class SlowGrammars:
    """Compiles nothing, and only when it is allowed to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_begun = 0

    def compile(self, _: Any) -> None:
        self.num_begun += 1
        assert self.go.wait(PATIENCE_S)


CONSTRAINED = SamplingParams(max_tokens=5, structured_outputs={"regex": "[a-e]*"})


@pytest.mark.parametrize("how", ["closes", "dies"])
def test_an_engine_that_ends_while_a_grammar_is_compiled_ends_its_request(how: str) -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        engine.grammars = grammars = SlowGrammars()
        tasks = [asyncio.create_task(llm.submit(A, CONSTRAINED)) for _ in range(5)]
        while not grammars.num_begun:
            await asyncio.sleep(0.001)
        if how == "closes":
            await llm.close()
        else:
            engine.fail_with = RuntimeError("the device is gone")
            engine.steps.release()
            with contextlib.suppress(EngineDeadError):
                await (await llm.submit(A, FIVE)).result()
        grammars.go.set()
        for task in tasks:
            with pytest.raises(EngineDeadError, match="closed" if how == "closes" else "gone"):
                await task
        assert llm.num_live == llm.num_waiting == 0
        engine.outputs.clear()  # a dead engine forgets nothing

    run(test)


def test_requests_whose_grammars_are_compiled_wait_like_others() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        engine.grammars = grammars = SlowGrammars()
        tasks = [asyncio.create_task(llm.submit(A, CONSTRAINED)) for _ in range(50)]
        while not grammars.num_begun:
            await asyncio.sleep(0.001)
        assert llm.num_waiting == 50
        await asyncio.to_thread(threading.Event().wait, 0)  # others' threads are free
        other = await llm.submit(A, FIVE)  # and so is the engine
        engine.steps.release(5)
        assert (await other.result()).outputs[0].text == "abcde"
        grammars.go.set()
        answers = await asyncio.gather(*tasks)
        assert llm.num_waiting == 0
        engine.steps.release(5 * 50)
        for answer in answers:
            assert (await answer.result()).outputs[0].text == "abcde"

    run(test)


def test_a_deadline_ends_with_what_there_is() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        params = SamplingParams(max_tokens=5, n=2)
        answer = await llm.submit(A, params, deadline_s=0.05)
        engine.steps.release(3)
        output = await answer.result()
        for sample in output.outputs:
            assert sample.finish_reason == "length"
            assert sample.stop_reason == "deadline"
            assert "abc".startswith(sample.text)
        deltas = [delta async for delta in answer]
        for index in (0, 1):
            mine = [delta for delta in deltas if delta.index == index]
            assert mine[-1].finish_reason == "length"
            assert mine[-1].stop_reason == "deadline"
            assert "".join(delta.text for delta in mine) == output.outputs[index].text

    run(test)


def test_a_deadline_that_is_kept_changes_nothing() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        engine.steps.release(5)
        answer = await llm.submit(A, FIVE, deadline_s=60)
        sample = (await answer.result()).outputs[0]
        assert (sample.text, sample.stop_reason) == ("abcde", None)

    run(test)


def test_answers_of_one_call_share_their_event() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        asks = [Ask(prompt_token_ids=[ord(char)], params=FIVE) for char in "ak"]
        first, second = await llm.submit_all(asks)
        assert first.changed is second.changed
        texts = ["", ""]
        while not (first.ended and second.ended):
            first.changed.clear()
            engine.steps.release()
            await first.changed.wait()
            for index, answer in enumerate((first, second)):
                texts[index] += "".join(delta.text for delta in answer.take())
        for index, answer in enumerate((first, second)):
            texts[index] += "".join(delta.text for delta in answer.take())
        assert texts == ["abcde", "klmno"]

    run(test)


def test_prompt_logprobs_come_with_the_first_delta() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        answer = await llm.submit(A, SamplingParams(max_tokens=5, prompt_logprobs=1))
        assert answer.prompt_logprobs is None
        engine.steps.release()
        await anext(answer)
        assert answer.prompt_logprobs == [None]
        engine.steps.release(4)
        assert (await answer.result()).prompt_logprobs == [None]

    run(test)


def test_generate_yields_all_that_there_is_so_far() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        for prompt in ("a", A, {"prompt": "a"}, {"prompt_token_ids": A}):
            seen = []
            engine.steps.release()
            async for output in llm.generate(prompt, FIVE):
                seen.append(output)
                engine.steps.release()
            texts = [output.outputs[0].text for output in seen]
            assert texts[-1] == "abcde"
            assert all("abcde".startswith(text) for text in texts)
            assert texts == sorted(set(texts))
            assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
            while engine.steps.acquire(blocking=False):
                pass

    run(test)


def test_a_generator_that_is_closed_aborts() -> None:
    async def test(llm: AsyncLLM, engine: ScriptedEngine) -> None:
        engine.steps.release()
        outputs = llm.generate("a", FIVE)
        await anext(outputs)
        await outputs.aclose()
        while llm.num_live:
            await asyncio.sleep(0.001)

    run(test)


def test_a_dead_engine_ends_every_request_with_an_error() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        llm = AsyncLLM.over(scripted_model(engine))
        answers = [await llm.submit(A, SamplingParams(max_tokens=5, n=2)) for _ in range(3)]
        engine.steps.release()
        await anext(answers[0])
        engine.fail_with = RuntimeError("the device is gone")
        engine.steps.release()
        for answer in answers:
            output = await answer.result()
            assert "the device is gone" in str(output.error)
            assert {sample.finish_reason for sample in output.outputs} == {"error"}
            assert output.outputs[0].text == "a"
            assert [delta async for delta in answer][-1].finish_reason == "error"
        assert not llm.is_alive
        assert isinstance(llm.error, RuntimeError)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await llm.submit(A, FIVE)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await llm.call(lambda e: e.has_work)
        await llm.close()

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_closing_ends_what_is_left_with_abort() -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        llm = AsyncLLM.over(scripted_model(engine))
        answer = await llm.submit(A, FIVE)
        engine.steps.release()
        await anext(answer)
        await llm.close()
        await llm.close()
        assert (await answer.result()).outputs[0].finish_reason == "abort"
        assert not llm.is_alive
        with pytest.raises(EngineDeadError, match="closed"):
            await llm.submit(A, FIVE)

    asyncio.run(asyncio.wait_for(main(), PATIENCE_S))


def test_an_unused_one_can_be_closed() -> None:
    async def main() -> None:
        await AsyncLLM.over(scripted_model(ScriptedEngine())).close()

    asyncio.run(main())


def test_one_loop_after_another() -> None:
    engine = ScriptedEngine()
    llm = AsyncLLM.over(scripted_model(engine))

    async def one() -> str:
        answer = await llm.submit(A, FIVE)
        engine.steps.release(5)
        return (await asyncio.wait_for(answer.result(), PATIENCE_S)).outputs[0].text

    async def abandon() -> None:
        await llm.submit(A, FIVE)

    async def close() -> None:
        await llm.close()

    assert asyncio.run(one()) == "abcde"
    asyncio.run(abandon())
    assert asyncio.run(one()) == "abcde"
    asyncio.run(close())
    assert not engine.outputs

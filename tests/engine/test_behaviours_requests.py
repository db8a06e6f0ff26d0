"""What is refused, what is cut short and what is aborted leaves the engine sound (B11, B28)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.asks import assert_answers, only
from tests.engine.mini import Mini, drain, greedy, prompts, run, tokens


@pytest.mark.parametrize("asynchronous", [True, False])
def test_abort_in_every_state(mini: Mini, asynchronous: bool) -> None:
    """Waiting, in prefill, decoding, preempted, finished: what was said so far can be taken."""
    asked = [(p, greedy(30)) for p in prompts([40, 9, 12, 10, 11], seed=61)]
    want = tokens(run(mini.engine(), asked))
    preemptions = 0
    for steps in range(12):
        for victim in range(5):
            engine = mini.engine(
                pages=11, slots=3, chunk=9, budget=12, asynchronous=asynchronous, max_len=80
            )
            ids = [engine.submit(*request) for request in asked]
            for _ in range(steps):
                engine.step()
            engine.abort(ids[victim])
            engine.abort(ids[victim])
            sample = engine.take(ids[victim]).outputs[0]
            assert sample.finish_reason == "abort"
            assert sample.token_ids == want[victim][0][: len(sample.token_ids)]
            with pytest.raises(ValueError, match="no request"):
                engine.take(ids[victim])
            engine.step()
            for i in set(range(5)) - {victim}:
                engine.abort(ids[i])
            drain(engine)
            assert engine.scheduler.pool.num_held == 0
            preemptions += engine.stats().preemptions
    assert preemptions > 0


def test_a_sample_that_ended_is_not_aborted(mini: Mini) -> None:
    engine = mini.engine()
    request_id = engine.submit(prompts([5])[0], greedy(3))
    drain(engine)
    engine.abort(request_id)
    assert engine.take(request_id).outputs[0].finish_reason == "length"


@pytest.mark.parametrize("length", [62, 63, 64, 65])
@pytest.mark.parametrize("max_tokens", [1, 2, 100, None])
def test_edge_of_the_context(mini: Mini, length: int, max_tokens: int | None) -> None:
    """B11: output is cut at the context with reason "length"; a prompt without room is refused."""
    engine = mini.engine(max_len=64)
    prompt = prompts([length], seed=62)[0]
    ask = replace(greedy(1), max_tokens=max_tokens)
    if length >= 64:
        with pytest.raises(ValueError, match=rf"{length}.*max_model_len=64"):
            engine.submit(prompt, ask)
    else:
        output = run(engine, [(prompt, ask)])[0]
        room = 64 - length
        assert only(output) == mini.oracle.greedy(prompt, min(max_tokens or room, room))[0]
        assert output.outputs[0].finish_reason == "length"
    assert_answers(mini, engine)


def test_scoring_may_fill_the_context(mini: Mini) -> None:
    engine = mini.engine(max_len=64)
    prompt = prompts([64], seed=62)[0]
    output = run(engine, [(prompt, greedy(0, prompt_logprobs=0))])[0]
    assert only(output) == []
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 64


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "the prompt is empty"),
    ([300], "300 is outside the vocabulary of 300"),
    ([-1], "-1 is outside"),
    ([1, True], "True is not an integer"),
    ([1.0], r"1\.0 is not an integer"),
    (["a"], "'a' is not an integer"),
    ([None], "None is not an integer"),
    ([2**40], "outside the vocabulary"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_bad_prompts_are_refused(mini: Mini, prompt: Any, message: str) -> None:
    """B28 and its like: before any state changes, and the engine goes on."""
    engine = mini.engine()
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, greedy(4))
    assert not engine.has_work
    engine.check()
    assert_answers(mini, engine)


def test_prompts_may_be_numpy(mini: Mini) -> None:
    ids = prompts([9], seed=63)[0]
    outputs = run(mini.engine(), [(ids, greedy(4)), (np.array(ids), greedy(4))])
    assert tokens(outputs)[0] == tokens(outputs)[1]


def test_request_ids(mini: Mini) -> None:
    """An id in use is refused; ids that the engine makes never meet those of callers."""
    engine = mini.engine()
    prompt = prompts([5])[0]
    taken = [engine.submit(prompt, greedy(2), request_id=f"request-{i}") for i in (1, 2, 4)]
    made = [engine.submit(prompt, greedy(2)) for _ in range(4)]
    assert len({*taken, *made}) == 7
    with pytest.raises(ValueError, match="'request-2' is in use"):
        engine.submit(prompt, greedy(2), request_id="request-2")
    drain(engine)
    assert tokens([engine.take(i) for i in [*taken, *made]]) == tokens(
        run(mini.engine(), [(prompt, greedy(2))] * 7)
    )
    assert engine.submit(prompt, greedy(2), request_id="request-2") == "request-2"

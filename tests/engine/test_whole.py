"""Requests that nobody looks at before their end: the same results, and no deltas before."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.observer import Observer
from jaxserve.outputs import RequestOutput
from jaxserve.recorder import LATE_TOKENS
from jaxserve.report import StepOutput
from jaxserve.runner import Ticket
from tests.engine.mini import Mini, drain, greedy, prompts, run

EOS = frozenset({2})
LONG = 2 * LATE_TOKENS + 9
FORCE_END = {2: 100.0}
ASKS: dict[str, dict[str, Any]] = {
    "long": {"max_tokens": LONG},
    "short": {"max_tokens": 3},
    "sampled, several": {"max_tokens": LONG, "temperature": 1.4, "seed": 4, "n": 3},
    "bytes of no character": {"max_tokens": LONG, "allowed_token_ids": list(range(190, 256))},
    "an end token": {"max_tokens": 40, "ignore_eos": False, "logit_bias": FORCE_END},
    "a stop token, shown": {
        "max_tokens": LONG,
        "allowed_token_ids": [97, 98],
        "temperature": 1.0,
        "seed": 1,
        "stop_token_ids": [98],
        "min_tokens": LATE_TOKENS + 3,
        "include_stop_str_in_output": True,
    },
    "a stop string": {"max_tokens": LONG, "allowed_token_ids": [97], "stop": "aaaa"},
    "log-probabilities": {"max_tokens": LONG, "logprobs": 2},
    "no text": {"max_tokens": LONG, "detokenize": False},
}


def told(output: RequestOutput) -> list[Any]:
    return [
        (s.text, s.token_ids, s.logprobs, s.finish_reason, s.stop_reason) for s in output.outputs
    ]


@pytest.mark.parametrize("name", ASKS)
@pytest.mark.parametrize("multi_step", [1, 4])
def test_a_whole_request_is_what_it_is_in_pieces(mini: Mini, name: str, multi_step: int) -> None:
    engine = mini.engine(eos=EOS, multi_step=multi_step)
    ask, prompt = greedy(**ASKS[name]), [3, 4, 5]
    in_pieces = engine.submit(prompt, ask)
    pieces = drain(engine)
    whole = engine.submit(prompt, ask, whole=True)
    ends = drain(engine)
    assert len(pieces) >= len(ends)
    assert [delta.finish_reason is not None for delta in ends] == [True] * ask.n
    assert told(engine.take(whole)) == told(engine.take(in_pieces))


def test_what_is_asked_for_in_between_has_all_of_its_text(mini: Mini) -> None:
    engine = mini.engine(eos=EOS)
    ask, prompt = greedy(60), prompts([7])[0]
    request_id, other = engine.submit(prompt, ask, whole=True), engine.submit(prompt, ask)
    for _ in range(9):
        engine.step()
    one, two = engine.output(request_id).outputs[0], engine.output(other).outputs[0]
    assert one.token_ids == two.token_ids
    assert one.text == two.text != ""
    engine.abort(request_id)
    engine.abort(other)
    assert told(engine.take(request_id)) == told(engine.take(other))


class _Kept(Observer):
    """What requests were when their end was told."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []

    def on_end(self, output: RequestOutput) -> None:
        self.outputs.append(output)


@pytest.mark.parametrize("whole", [False, True])
def test_an_observer_is_told_of_the_whole_text(mini: Mini, whole: bool) -> None:
    engine = mini.engine(eos=EOS)
    engine.observer = kept = _Kept()
    request_id = engine.submit([3, 4, 5], greedy(13, stop="never"), whole=whole)
    drain(engine)
    (output,) = kept.outputs
    assert output.outputs[0].text != ""
    assert told(output) == told(engine.take(request_id))


def test_a_wait_that_is_interrupted_can_be_taken_up_again(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, ask = prompts([6])[0], greedy(20)
    undisturbed = run(mini.engine(eos=EOS), [(prompt, ask)])
    engine = mini.engine(eos=EOS)
    request_id = engine.submit(prompt, ask)
    read, calls = engine.runner.read, []

    def interrupted(ticket: Ticket) -> StepOutput:
        calls.append(1)
        if len(calls) in (3, 4, 9):
            raise KeyboardInterrupt
        return read(ticket)

    monkeypatch.setattr(engine.runner, "read", interrupted)
    num_interrupts = 0
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 3
    engine.check()
    assert told(engine.take(request_id)) == told(undisturbed[0])

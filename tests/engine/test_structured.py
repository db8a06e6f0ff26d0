"""Constraints on text: what comes out obeys them, whatever runs beside it and however it runs."""

from __future__ import annotations

import contextlib
import gc
import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from jaxserve.constraints import Constraints, Masks
from jaxserve.sampling_params import SamplingParams
from scheduler import FinishReason, StepPlan
from tests.engine.asks import FORCE, assert_answers, sampled
from tests.engine.mini import Mini, drain, greedy, logprobs, prompts, run, solo, tokens

EOS = frozenset({2})
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
PATTERN = r"[a-z]{3,8}-[0-9]{2}"
GRAMMAR = 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-c]{1,3}/'
GBNF = 'root ::= "<" [a-c] ("," [a-c])? ">"'
BIAS = {ord(char): -30.0 for char in "\t\n ,"}
"""Random weights would go on with these for as long as they may."""
LONG = {"max_tokens": 160}


def is_json(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CONSTRAINTS: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": SCHEMA}, is_json),
    "json-text": ({"json": json.dumps(SCHEMA)}, is_json),
    "regex": ({"regex": PATTERN}, re.compile(PATTERN).fullmatch),
    "choice": ({"choice": ["yes", "no", "maybe so"]}, {"yes", "no", "maybe so"}.__contains__),
    "lark": ({"grammar": GRAMMAR}, re.compile(r"<[a-c]{1,3}(,[a-c]{1,3})*>").fullmatch),
    "gbnf": ({"grammar": GBNF}, re.compile(r"<[a-c](,[a-c])?>").fullmatch),
}
each_constraint = pytest.mark.parametrize("name", CONSTRAINTS)
each_loop = pytest.mark.parametrize("asynchronous", [True, False])


@pytest.fixture(params=["whole", "split"])
def mini(request: pytest.FixtureRequest, mini: Mini, split_mini: Mini) -> Mini:
    """Both ways to run a step that a constraint limits."""
    if request.param == "split":
        return split_mini
    if mini.runner.masked_steps != "whole":
        pytest.skip("no CPU kernels here")
    return mini


class _Astray:
    """A matcher that is shown another token than was sampled."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def consume_tokens(self, tokens: list[int]) -> bool:
        taken: bool = self._matcher.consume_tokens([ord("z")] * len(tokens))
        return taken


@each_constraint
@each_loop
def test_every_sample_obeys(mini: Mini, name: str, asynchronous: bool) -> None:
    constraint, obeys = CONSTRAINTS[name]
    engine = mini.engine(eos=EOS, asynchronous=asynchronous, multi_step=4)
    asks = [
        (prompt, SamplingParams(structured_outputs=constraint, logit_bias=BIAS, **fields))
        for prompt in prompts([3, 40])
        for fields in (
            {"temperature": 0, **LONG},
            {"temperature": 1.3, "seed": 5, "n": 3, **LONG},
            {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 1.0, "seed": 1, **LONG},
        )
    ]
    outputs = run(engine, asks)
    samples = [sample for output in outputs for sample in output.outputs]
    assert len(samples) == 10
    for sample in samples:
        assert sample.finish_reason == "stop", sample
        assert obeys(sample.text), sample.text
        assert bytes(t for t in sample.token_ids if t != 2).decode() == sample.text
    assert engine.compilations.count == 0


def test_a_json_object_of_any_kind(mini: Mini) -> None:
    params = sampled(
        max_tokens=200, structured_outputs={"json_object": True}, logit_bias={125: 9.0}, seed=3
    )
    output = run(mini.engine(eos=EOS), [(prompts([5])[0], params)])[0].outputs[0]
    assert isinstance(json.loads(output.text), dict)


def test_what_is_cut_by_length_is_a_beginning(mini: Mini) -> None:
    ask = greedy(4, structured_outputs={"regex": "(ab){10}"})
    output = run(mini.engine(eos=EOS), [(prompts([5])[0], ask)])[0].outputs[0]
    assert (output.text, output.finish_reason) == ("abab", "length")


@pytest.mark.parametrize("multi_step", [1, 4])
@each_loop
def test_neighbours_are_what_they_are_alone(
    mini: Mini, asynchronous: bool, multi_step: int
) -> None:
    """Greedy and drawn ones, one that asks for log-probabilities, and the constrained itself."""
    constrained = greedy(40, structured_outputs={"json": SCHEMA}, ignore_eos=False)
    others = [greedy(30), sampled(30, seed=7), greedy(20, logprobs=2), greedy(9, prompt_logprobs=1)]
    asks = list(
        zip(prompts([20, 3, 30, 9, 17, 70]), [constrained, *others, constrained], strict=True)
    )
    options: dict[str, Any] = {"asynchronous": asynchronous, "multi_step": multi_step}
    alone = solo(mini.engine(eos=EOS, **options), asks)
    for every in (0, 2):
        together = run(mini.engine(eos=EOS, **options), asks, every=every)
        assert tokens(together) == tokens(alone)
        for one, other in zip(together, alone, strict=True):
            # At this hidden size XLA sums in another order in another program.
            if one.outputs[0].logprobs is not None:
                assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-5)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("multi_step", [1, 3])
@each_loop
def test_preemption_does_not_lose_the_place(
    mini: Mini, asynchronous: bool, multi_step: int, preemption: str
) -> None:
    ask = greedy(60, structured_outputs={"regex": "([a-m]{4}-[n-z]{4};){6}"})
    asks = [(prompt, ask) for prompt in prompts([20, 21, 22, 23])]
    alone = solo(mini.engine(eos=EOS), asks)
    engine = mini.engine(
        eos=EOS,
        pages=24,
        asynchronous=asynchronous,
        multi_step=multi_step,
        preemption=preemption,
    )
    together = run(engine, asks)
    assert engine.stats().preemptions > 0
    assert tokens(together) == tokens(alone)
    assert re.fullmatch("([a-m]{4}-[n-z]{4};){6}", together[0].outputs[0].text)


def test_a_step_that_asks_is_one_of_several_in_a_dispatch(mini: Mini) -> None:
    engine = mini.engine(eos=EOS, multi_step=4)
    ask = greedy(70, structured_outputs={"regex": "([a-m]{4}-[n-z]{4};){6}"})
    outputs = run(engine, [(prompt, ask) for prompt in prompts([20, 21])])
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "stop"]
    stats = engine.stats()
    if mini.runner.masked_steps == "whole":
        assert stats.dispatches < stats.steps / 3
    else:
        assert stats.dispatches == stats.steps


@pytest.mark.parametrize("max_tokens", range(4, 7))
def test_a_text_that_its_last_token_completes_was_not_cut(mini: Mini, max_tokens: int) -> None:
    engine = mini.engine(eos=EOS, multi_step=4)
    asks = [
        greedy(max_tokens, structured_outputs={"regex": f"[a-m]{{{length}}}"})
        for length in (max_tokens, max_tokens + 1)
    ]
    done, cut = run(engine, [(prompts([20])[0], ask) for ask in asks])
    assert (done.outputs[0].finish_reason, cut.outputs[0].finish_reason) == ("stop", "length")
    assert [len(output.outputs[0].text) for output in (done, cut)] == [max_tokens] * 2


def test_a_deadline_leaves_matchers_to_the_step_that_has_them(mini: Mini) -> None:
    engine = mini.engine(eos=EOS, multi_step=4)
    request_id = engine.submit(prompts([5])[0], greedy(60, structured_outputs={"regex": "[a-d]*"}))
    for _ in range(4):
        engine.step()
    (constraint,) = engine._constraints._known.values()
    constraint.matcher = None  # type: ignore[assignment]  # whoever touches it now fails
    (last,) = engine.abort(request_id, FinishReason.LENGTH)
    assert last.finish_reason == "length"
    with contextlib.suppress(Exception):  # of the step that asks
        drain(engine)


class _TooComplex:
    """A matcher that has become too complex by the time its mask was filled."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "too many states"


def test_what_becomes_too_complex_ends_alone(mini: Mini, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its mask is filled; the text of the request is what it had until then."""
    asks = [greedy(8, structured_outputs={"regex": "[a-d]{8}"}), greedy(8)]
    engine = mini.engine(eos=EOS, multi_step=4)
    ids = [engine.submit(p, a) for p, a in zip(prompts([4, 5]), asks, strict=True)]
    (constraint,) = engine._constraints._known.values()
    real, fill, calls = constraint.matcher, Constraints._fill, []

    def fill_real(self: Constraints, words: Any, matchers: list[Any]) -> None:
        calls.append(1)
        fill(self, words, [(real, row) for _, row in matchers])
        if len(calls) == 4:
            constraint.matcher = _TooComplex(real)  # type: ignore[assignment]

    monkeypatch.setattr(Constraints, "_fill", fill_real)
    drain(engine)
    broken, other = (engine.take(request_id) for request_id in ids)
    assert broken.outputs[0].finish_reason == "error"
    assert broken.error == "the constraint cannot be followed any more: too many states"
    assert broken.blamed == "structured_outputs"
    assert 0 < len(broken.outputs[0].token_ids) < 8
    assert tokens([other]) == tokens(solo(mini.engine(eos=EOS), [(prompts([4, 5])[1], asks[1])]))


def test_masks_that_cannot_be_made_end_only_who_needs_them(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a text that is complete already; and nobody's constraint is to blame."""
    if mini.runner.masked_steps != "whole":
        pytest.skip("only a step that asks is on another thread")
    fill, calls = Constraints._fill, []

    def fail_late(self: Constraints, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("no memory for masks")
        fill(self, *arguments)

    monkeypatch.setattr(Constraints, "_fill", fail_late)
    lengths = (5, 20)
    asks = [greedy(30, structured_outputs={"regex": f"[a-c]{{{length}}}"}) for length in lengths]
    engine = mini.engine(eos=EOS, multi_step=4)
    done, failed = run(engine, list(zip(prompts([4, 5]), asks, strict=True)))
    assert (done.outputs[0].finish_reason, done.error) == ("stop", None)
    assert failed.outputs[0].finish_reason == "error"
    assert failed.error == "the constraint's masks could not be made: no memory for masks"
    assert failed.blamed is None


def test_the_time_of_a_step_begins_with_its_first_half(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mini.runner.masked_steps != "split":
        pytest.skip("a step is one program")
    engine = mini.engine(eos=EOS)
    masks, num_started = Constraints.masks, []

    def noted(self: Constraints, plan: StepPlan) -> Masks:
        num_started.append(len(engine._dispatcher._stopwatch._started))
        return masks(self, plan)

    monkeypatch.setattr(Constraints, "masks", noted)
    run(engine, [(prompts([4])[0], greedy(8, structured_outputs={"regex": "[a-c]{8}"}))])
    assert num_started == [1] * 8


def test_the_scheduler_knows_whose_text_may_end(mini: Mini) -> None:
    engine = mini.engine(eos=EOS)
    for ask in (greedy(8), greedy(8, stop="x"), greedy(8, structured_outputs={"regex": "a*"})):
        engine.submit(prompts([4])[0], ask)
    assert [seq.text_may_end for seq in engine._samples] == [False, True, True]
    splits = mini.runner.masked_steps == "split"
    assert [seq.single_step for seq in engine._samples] == [False, False, splits]
    drain(engine)


@pytest.mark.parametrize("length", range(5, 9))
@each_loop
def test_a_text_may_be_complete_in_any_step_of_a_dispatch(
    mini: Mini, asynchronous: bool, length: int
) -> None:
    engine = mini.engine(eos=EOS, multi_step=4, asynchronous=asynchronous)
    ask = greedy(30, structured_outputs={"regex": f"[a-m]{{{length}}}"})
    output = run(engine, [(prompts([20])[0], ask)])[0]
    assert (output.outputs[0].finish_reason, output.error) == ("stop", None)
    assert len(output.outputs[0].text) == length


def test_an_answer_that_fails_ends_those_who_wait_for_it(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mini.runner.masked_steps != "whole":
        pytest.skip("only a step that asks is on another thread")
    asks = [greedy(8, structured_outputs={"regex": "[a-d]{8}"}), greedy(8)]
    engine = mini.engine(eos=EOS, multi_step=4)
    ids = [engine.submit(p, a) for p, a in zip(prompts([4, 5]), asks, strict=True)]
    engine.step()
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("no memory for masks")

    monkeypatch.setattr(engine._constraints, "_fill", fail)
    drain(engine)
    limited, free = (engine.take(request_id) for request_id in ids)
    assert calls
    assert limited.outputs[0].finish_reason == "error"
    assert limited.error is not None
    assert "no memory for masks" in limited.error
    assert tokens([free]) == tokens(solo(mini.engine(eos=EOS), [(prompts([4, 5])[1], asks[1])]))


def test_an_engine_may_go_while_its_step_asks(mini: Mini) -> None:
    engine = mini.engine(eos=EOS, multi_step=4)
    ask = greedy(60, structured_outputs={"regex": "[a-d]*"})
    for prompt in prompts([4, 5]):
        engine.submit(prompt, ask)
    for _ in range(3):
        engine.step()
    del engine
    gc.collect()
    assert_answers(mini, mini.engine(eos=EOS))


def test_without_a_limit_on_text_a_constraint_changes_nothing(mini: Mini) -> None:
    """Every token that the model would take is allowed; so are its log-probabilities the same."""
    letters = list(range(ord("a"), ord("z") + 1))
    prompt, ask = prompts([12])[0], greedy(12, allowed_token_ids=letters, logprobs=1)
    free = run(mini.engine(), [(prompt, ask)])
    held_ask = replace(ask, allowed_token_ids=None, structured_outputs={"regex": "[a-z]*"})
    held = run(mini.engine(), [(prompt, held_ask)])
    assert tokens(held) == tokens(free)
    assert logprobs(held[0]) == pytest.approx(logprobs(free[0]), abs=1e-5)


def test_allowed_ids_beside_a_constraint_are_refused() -> None:
    with pytest.raises(ValueError, match="structured_outputs beside allowed_token_ids"):
        greedy(8, structured_outputs={"regex": "ab"}, allowed_token_ids=[ord("z")])


def test_what_cannot_be_followed_any_more_ends_alone(mini: Mini) -> None:
    ask, fine = greedy(8, structured_outputs={"regex": "[a-d]{8}"}), greedy(8)
    engine = mini.engine(eos=EOS)
    ids = [engine.submit(p, a) for p, a in zip(prompts([4, 5]), [ask, fine], strict=True)]
    for _ in range(3):
        engine.step()
    (constraint,) = engine._constraints._known.values()
    constraint.matcher = _Astray(constraint.matcher)  # as if the device had not obeyed
    drain(engine)
    broken, other = (engine.take(request_id) for request_id in ids)
    assert broken.outputs[0].finish_reason == "error"
    assert broken.error is not None
    assert "cannot be followed any more" in broken.error
    assert len(broken.error) < 600
    assert tokens([other]) == tokens(solo(mini.engine(eos=EOS), [(prompts([4, 5])[1], fine)]))
    assert_answers(mini, engine)


@pytest.mark.parametrize(
    "extra",
    [{"ignore_eos": True}, {"ignore_eos": True, "logit_bias": {2: FORCE}}, {"min_tokens": 30}],
)
def test_a_complete_text_ends_whatever_else_is_asked(mini: Mini, extra: dict[str, Any]) -> None:
    ask = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs={"regex": "[a-c]{4}"}, **extra
    )
    output = run(mini.engine(eos=EOS), [(prompts([4])[0], ask)])[0].outputs[0]
    assert re.fullmatch("[a-c]{4}", output.text)
    assert output.finish_reason == "stop"


def test_a_text_that_could_go_on_ends_only_with_an_end_token(mini: Mini) -> None:
    held = {"structured_outputs": {"regex": "ab+"}}
    ends = greedy(20, ignore_eos=False, logit_bias={2: FORCE}, **held)
    never = greedy(20, **held)
    for eos, ask, text, reason in [
        (EOS, ends, "ab", "stop"),
        (frozenset[int](), never, "a" + "b" * 19, "length"),
    ]:
        output = run(mini.engine(eos=eos), [(prompts([4])[0], ask)])[0].outputs[0]
        assert (output.text, output.finish_reason) == (text, reason)


@each_loop
def test_stop_strings_and_aborts(mini: Mini, asynchronous: bool) -> None:
    engine = mini.engine(eos=EOS, asynchronous=asynchronous)
    held = {"structured_outputs": {"regex": "(abc)*"}, "ignore_eos": True}
    stopped = engine.submit(prompts([4])[0], greedy(30, stop="cab", **held))
    aborted = engine.submit(prompts([5])[0], greedy(100, **held))
    for _ in range(9):
        engine.step()
    engine.abort(aborted)
    drain(engine)
    first, second = engine.take(stopped).outputs[0], engine.take(aborted).outputs[0]
    assert (first.text, first.finish_reason, first.stop_reason) == ("ab", "stop", "cab")
    assert second.finish_reason == "abort"
    assert "abcabcabc".startswith(second.text)
    assert_answers(mini, engine)


@pytest.mark.parametrize(
    ("constraint", "complaint"),
    [
        ({"regex": "[a"}, "structured_outputs.regex cannot be followed: .*unclosed character"),
        ({"grammar": 'start: "a'}, "structured_outputs.grammar cannot be"),
        ({"grammar": "start: nowhere"}, "structured_outputs.grammar cannot be followed: .*nowhere"),
        ({"json": '{"type": '}, "structured_outputs.json is not JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": {"type": "foo"}}, "structured_outputs.json cannot be followed: .*foo"),
        (
            {"json": {"type": "string", "minLength": 5, "maxLength": 2}},
            "structured_outputs.json cannot be followed",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(
    mini: Mini, constraint: dict[str, Any], complaint: str
) -> None:
    engine = mini.engine(eos=EOS)
    with pytest.raises(ValueError, match=complaint) as caught:
        engine.submit([3, 4], SamplingParams(structured_outputs=constraint))
    assert "\n" not in str(caught.value)
    assert not engine.has_work
    assert_answers(mini, engine)


def test_an_engine_without_masked_steps_says_so(
    mini: Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mini.runner, "masked_steps", "off")
    with pytest.raises(ValueError, match="masked_steps='auto'"):
        mini.engine().submit([3], SamplingParams(structured_outputs={"regex": "a"}))


def test_masks_have_a_row_for_each_slot_whatever_the_step_has(mini: Mini) -> None:
    words = mini.runner.spec.sizes.allowed_words
    constraints = Constraints(mini.engine(eos=EOS).grammars, num_slots=3, num_rows=8, words=words)
    assert constraints.masks(StepPlan((), (), ())).words.shape == (3, words)


def test_equal_constraints_are_compiled_once(mini: Mini) -> None:
    grammars = mini.engine(eos=EOS).grammars
    first = SamplingParams(structured_outputs={"regex": "ab"}).structured_outputs
    again = SamplingParams(structured_outputs={"regex": "ab"}).structured_outputs
    assert first is not again
    assert grammars.compile(first) is grammars.compile(again)  # type: ignore[arg-type]
    assert len(grammars._kept) == 1

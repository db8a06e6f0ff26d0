"""Grammars of forced calls and of constraints after reasoning, checked with llguidance.

Random walks through a grammar show that whatever it allows is read as what was asked for.
"""

import json
import random

import jsonschema
import llguidance
import llguidance.numpy
import pytest
from llguidance import LLMatcher, LLTokenizer

from jaxserve.grammar import WHITESPACE
from jaxserve.protocol import Prompt, RequestError
from jaxserve.protocol.answer_format import AnswerFormat
from jaxserve.protocol.answer_templates import BUILT_IN
from jaxserve.protocol.grammars import LOOSE
from tests.protocol.answers import CLOCK, WEATHER, chat, output, tool, whole
from tests.protocol.tokenizers import marked_tokenizer

TOKENIZERS = {kind: marked_tokenizer(special=kind) for kind in (True, False, None)}
LL_TOKENIZERS = {
    kind: LLTokenizer(
        tokenizer.backend.to_str(), eos_token=tokenizer.backend.token_to_id("<|im_end|>")
    )
    for kind, tokenizer in TOKENIZERS.items()
}
FORMATS = ["qwen3", "hermes", "qwen3-coder", "qwen3.5", "llama3-json", "think", None]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TURN = "<|im_start|>assistant\n"
NAMED = {"type": "function", "function": {"name": "clock"}}


def answer_format(name, kind=False):
    return None if name is None else AnswerFormat(BUILT_IN[name], TOKENIZERS[kind])


def grammar_of(request, form, prompt=None):
    prompts = [] if prompt is None else [prompt]
    constraint = request.sampling_params(form, prompts).structured_outputs
    if constraint.grammar is None:
        return LLMatcher.grammar_from_json_schema(constraint.json)
    return LLMatcher.grammar_from_lark(constraint.grammar)


def accepts(grammar, text, kind=False):
    """Whether a text is a whole answer."""
    tokens = TOKENIZERS[kind].backend.encode(text, add_special_tokens=False).ids
    matcher = LLMatcher(LL_TOKENIZERS[kind], grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def walk(grammar, kind, seed, most=600):
    """A random answer, with a liking for what ends strings, lists and reasoning."""
    chance = random.Random(seed)
    matcher = LLMatcher(LL_TOKENIZERS[kind], grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    vocab = LL_TOKENIZERS[kind].vocab_size
    mask = llguidance.numpy.allocate_token_bitmask(1, vocab)
    closing = {*map(ord, '"]},'), TOKENIZERS[kind].backend.token_to_id("</think>")}
    tokens = []
    for _ in range(most):
        if matcher.is_accepting() and (matcher.is_stopped() or chance.random() < 0.5):
            return TOKENIZERS[kind].decode(tokens, skip_special_tokens=False)
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = [i for i in range(vocab) if mask[0, i // 32] >> (i % 32) & 1]
        text = [i for i in allowed if i > 127 or chr(i).isalnum() or chr(i) in '"{}[]:, \n/<>']
        ends = [i for i in allowed if i in closing]
        token = chance.choice(ends if ends and chance.random() < 0.4 else text or allowed)
        if token == TOKENIZERS[kind].eos_token_ids[0]:
            return TOKENIZERS[kind].decode(tokens, skip_special_tokens=False)
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    return None


@pytest.mark.parametrize("kind", [True, False, None])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("choice", "parallel", "most"),
    [("required", None, 99), ("required", False, 1), (NAMED, None, 1)],
)
def test_whatever_is_allowed_is_calls_that_fit_their_schemas(name, kind, choice, parallel, most):
    form = answer_format(name, kind)
    tools = [WEATHER, CLOCK]
    request = chat(tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
    schemas = {item["function"]["name"]: item["function"]["parameters"] for item in tools}
    grammar = grammar_of(request, form)
    texts = [text for seed in range(12) if (text := walk(grammar, kind, seed)) is not None]
    assert len(texts) >= 4  # of the others, most are lost in reasoning
    numbers = set()
    for text in texts:
        body = whole(request, output(text), answer_format=form)
        message = body["choices"][0]["message"]
        assert message["content"] is None, text
        calls = [call["function"] for call in message["tool_calls"]]
        numbers.add(len(calls))
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
            assert choice == "required" or call["name"] == "clock"
    assert max(numbers) <= most
    assert max(numbers) > 1 or most == 1 or name == "llama3-json"


@pytest.mark.parametrize("kind", [True, False, None])
def test_calls_may_follow_reasoning(kind):
    form = answer_format("qwen3", kind)
    request = chat(tools=[WEATHER], tool_choice="required")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
    free = grammar_of(request, form)
    assert accepts(free, call, kind)
    assert accepts(free, f"{call}\n{call}", kind)
    assert accepts(free, f"<think>\nI <b>think</b>.\n</think>\n\n{call}", kind)
    assert not accepts(free, "<think>\nI think.\n</think>\n\n", kind)
    assert not accepts(free, "I think.", kind)
    assert not accepts(free, call.replace("city", "town"), kind)
    opened = Prompt(TOKENIZERS[kind].encode(TURN + "<think>\n"), None)
    going_on = grammar_of(request, form, opened)
    assert accepts(going_on, f"I think.\n</think>{call}", kind)
    assert not accepts(going_on, "I think.\n</think>", kind)
    closed = Prompt(TOKENIZERS[kind].encode(TURN + "<think>\n\n</think>\n\n"), None)
    at_once = grammar_of(request, form, closed)
    assert accepts(at_once, call, kind)
    assert not accepts(at_once, f"<think>\nI think.\n</think>\n\n{call}", kind)


def test_an_allowed_subset_of_tools():
    names = [{"type": "function", "function": {"name": "clock"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    grammar = grammar_of(chat(tools=[WEATHER, CLOCK], tool_choice=choice), None)
    assert accepts(grammar, '[{"name": "clock", "arguments": {"hours": 1, "zone": "utc"}}]')
    assert not accepts(grammar, '[{"name": "weather", "arguments": {"city": "x"}}]')


def test_a_function_without_parameters_takes_any_object():
    request = chat(
        tools=[{"type": "function", "function": {"name": 'say "hi"'}}], tool_choice="required"
    )
    grammar = grammar_of(request, None)
    assert accepts(grammar, r'[{"name": "say \"hi\"", "arguments": {}}]')
    assert accepts(grammar, r'[{"name": "say \"hi\"", "arguments": {"x": [1]}}]')


def test_each_schema_has_its_own_definitions():
    def with_definition(name, kind):
        made = tool(name)
        made["function"]["parameters"] = {
            "$defs": {"it": {"type": kind}},
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/it"}},
            "required": ["x"],
        }
        return made

    tools = [with_definition("f", "integer"), with_definition("g", "boolean")]
    grammar = grammar_of(chat(tools=tools, tool_choice="required"), None)
    assert accepts(grammar, '[{"name": "f", "arguments": {"x": 1}}]')
    assert accepts(grammar, '[{"name": "g", "arguments": {"x": true}}]')
    assert not accepts(grammar, '[{"name": "f", "arguments": {"x": true}}]')


FITS = [
    ({"response_format": {"type": "json_object"}}, '{"b": 1}', "[1]"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        '{"a": 5}',
        '{"a": "5"}',
    ),
    ({"structured_outputs": {"json": SCHEMA}}, '{"a": 5}', "{}"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": 5}', "{}"),
    ({"structured_outputs": {"json_object": True}}, '{\n  "b": [\n    1\n  ]\n}', "1"),
    ({"structured_outputs": {"choice": ["yes", 'no / "never"']}}, 'no / "never"', "maybe"),
    ({"structured_outputs": {"regex": r"\d+/\d+\/[a-c]"}}, "12/5/a", "12-5-a"),
    ({"structured_outputs": {"regex": "(a|\n)+"}}, "a\na", "b"),
]


@pytest.mark.parametrize("kind", [True, False, None])
@pytest.mark.parametrize(("body", "fit", "unfit"), FITS)
def test_constraints_may_follow_reasoning(kind, body, fit, unfit):
    grammar = grammar_of(chat(**body), answer_format("qwen3", kind))
    for first in ("", "<think>\nWell.\n</think>\n\n", "<think></think>"):
        assert accepts(grammar, first + fit, kind)
        assert not accepts(grammar, first + unfit, kind)


def test_blanks_in_json_are_those_allowed_without_reasoning():
    assert LOOSE["whitespace_pattern"] == WHITESPACE


@pytest.mark.parametrize(("text", "complaint"), [("{", "valid JSON"), ("[1]", "a JSON object")])
def test_a_schema_must_be_a_json_object(text, complaint):
    request = chat(structured_outputs={"json": text})
    with pytest.raises(RequestError, match=f"structured_outputs.json is not {complaint}"):
        request.sampling_params(answer_format("qwen3"))


def test_a_schema_may_be_a_reference():
    made = tool("f")
    made["function"]["parameters"] = {"$ref": "#/$defs/it", "$defs": {"it": SCHEMA}}
    grammar = grammar_of(chat(tools=[made], tool_choice="required"), None)
    assert accepts(grammar, '[{"name": "f", "arguments": {"a": 1}}]')
    assert not accepts(grammar, '[{"name": "f", "arguments": {"a": "1"}}]')


def test_without_reasoning_a_constraint_is_the_engines_own():
    closed = Prompt(TOKENIZERS[False].encode(TURN + "<think>\n\n</think>\n\n"), None)
    for body, _, _ in FITS:
        plain = chat(**body).sampling_params().structured_outputs
        assert plain.kind != "grammar"
        for form, prompts in [
            (answer_format("hermes"), []),
            (answer_format("qwen3"), [closed]),
        ]:
            assert chat(**body).sampling_params(form, prompts).structured_outputs == plain


def test_a_grammar_is_taken_as_it_is():
    request = chat(structured_outputs={"grammar": 'start: "a"'})
    for form in (None, answer_format("qwen3")):
        assert request.sampling_params(form).structured_outputs.grammar == 'start: "a"'


@pytest.mark.parametrize(
    "other",
    [
        {"response_format": {"type": "json_object"}},
        {"tools": [WEATHER], "tool_choice": "required"},
    ],
)
def test_two_constraints_are_refused(other):
    request = chat(structured_outputs={"regex": "a"}, **other)
    with pytest.raises(RequestError, match="both constrain") as caught:
        request.sampling_params()
    assert caught.value.param == "structured_outputs"

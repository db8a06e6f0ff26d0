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

from jaxserve.grammar import grammar_text
from jaxserve.protocol import Prompt, RequestError
from jaxserve.protocol.answer_format import AnswerFormat
from jaxserve.protocol.answer_templates import BUILT_IN
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
    return grammar_text(request.sampling_params(form, prompts).structured_outputs)


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


@pytest.mark.parametrize("form", [None, "qwen3"])
def test_blanks_in_json_are_bounded(form):
    grammar = grammar_of(chat(response_format={"type": "json_object"}), answer_format(form))
    assert accepts(grammar, '{\n  "a": [1, 2]\n}')
    assert not accepts(grammar, '{\n\n"a": 1}')
    assert not accepts(grammar, '{  "a": 1}')


CHOICES = [*map(str, range(3000)), "a/b", "a\\/b", "x-y (z)|.*", "\n", "\\\n", "\r\n", "ü[1]\t"]


@pytest.mark.parametrize("form", [None, "qwen3"])
def test_any_number_of_choices_of_any_text(form):
    grammar = grammar_of(chat(structured_outputs={"choice": CHOICES}), answer_format(form))
    for text in ["0", "2999", *CHOICES[3000:]]:
        assert accepts(grammar, text), text
    for text in ["3000", "x-y z", "a//b", "n", "\\n"]:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize("kind", [True, False])
def test_choices_may_have_tokens_in_them(kind):
    choices = {"choice": ["plain", "<tool_call>x"]}
    grammar = grammar_of(chat(structured_outputs=choices), answer_format("qwen3", kind), None)
    assert accepts(grammar, "plain", kind)
    assert accepts(grammar, "<tool_call>x", kind)
    assert not accepts(grammar, "<tool_call>", kind)
    # The mark is a token, which letters cannot stand for.
    letters = LLMatcher(LL_TOKENIZERS[kind], grammar, log_level=0)
    assert letters.try_consume_tokens(list(b"<tool_call>x")) == 0


@pytest.mark.parametrize("form", [None, "qwen3"])
def test_formats_that_are_not_known_are_annotations(form):
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "password"},
            "enum": {"enum": [{"format": "path"}]},
            "const": {"type": "string", "format": "path"},
            "day": {"$ref": "#/$defs/format"},
        },
        "required": ["format", "enum", "const", "day"],
        "$defs": {"format": {"anyOf": [{"type": "string", "format": "date"}]}},
    }
    body = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    grammar = grammar_of(chat(response_format=body), answer_format(form))
    text = '{"format": "s", "enum": {"format":"path"}, "const": "", "day": "2026-11-30"}'
    assert accepts(grammar, text)
    assert not accepts(grammar, text.replace("path", "other"))
    assert not accepts(grammar, text.replace("2026-11-30", "today"))


@pytest.mark.parametrize("form", [None, "qwen3"])
def test_a_schemas_own_guidance_is_followed(form):
    one_of = [{"type": "string"}, {"type": "string", "maxLength": 3}]
    schema = {"oneOf": one_of, "x-guidance": {"coerce_one_of": True}}
    grammar = grammar_of(chat(structured_outputs={"json": schema}), answer_format(form))
    assert accepts(grammar, '"long enough"')


@pytest.mark.parametrize(
    ("parameters", "takes_others"),
    [
        (None, False),
        ({}, False),
        ({"type": "object", "properties": {}}, False),
        ({"type": "object", "properties": {}, "additionalProperties": True}, True),
        ({"type": "object"}, True),
    ],
)
def test_a_function_without_parameters_gets_no_arguments(parameters, takes_others):
    made = {"type": "function", "function": {"name": 'say "hi"'}}
    if parameters is not None:
        made["function"]["parameters"] = parameters
    grammar = grammar_of(chat(tools=[made], tool_choice="required"), None)
    assert accepts(grammar, r'[{"name": "say \"hi\"", "arguments": {}}]')
    with_one = r'[{"name": "say \"hi\"", "arguments": {"a": 1}}]'
    assert accepts(grammar, with_one) is takes_others


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


@pytest.mark.parametrize("form", [None, "qwen3"])
def test_a_schema_that_is_nested_too_deeply_is_refused(form):
    schema: dict = {"type": "integer"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    request = chat(structured_outputs={"json": schema})
    with pytest.raises(ValueError, match="nested too deeply to be enforced"):
        grammar_of(request, answer_format(form))

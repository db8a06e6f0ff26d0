"""Tools: their fields, the choice among them, and past calls in a conversation."""

import pytest

from jaxserve.protocol import RequestError, convert_body
from jaxserve.protocol.chat_request import ChatCompletionRequest
from tests.protocol.answers import CLOCK, TOKENIZER, USER, WEATHER, chat
from tests.protocol.tokenizers import marked_tokenizer

TOOLS = [WEATHER, CLOCK]


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("choice", "names", "is_forced", "is_named", "many"),
    [
        (None, ["weather", "clock"], False, False, True),
        ("auto", ["weather", "clock"], False, False, True),
        ("none", [], False, False, True),
        ("required", ["weather", "clock"], True, False, True),
        (named("clock"), ["clock"], True, True, False),
        (allowed("auto", "clock"), ["clock"], False, False, True),
        (allowed("required", "clock", "weather"), ["clock", "weather"], True, False, True),
    ],
)
def test_choices(choice, names, is_forced, is_named, many):
    use = chat(tools=TOOLS, tool_choice=choice).tool_use()
    assert [tool.function.name for tool in use.tools] == names
    assert (use.is_forced, use.is_named, use.allows_many) == (is_forced, is_named, many)
    alone = chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).tool_use()
    assert choice == "none" or not alone.allows_many


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools(tools):
    for choice in (None, "auto", "none"):
        request = chat(tools=tools, tool_choice=choice)
        assert request.tool_use().for_template() is None
        assert request.sampling_params().structured_outputs is None
    with pytest.raises(RequestError, match="needs tools") as caught:
        chat(tools=tools, tool_choice="required").sampling_params()
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("choice", [named("nope"), allowed("auto", "nope"), allowed("required")])
def test_a_choice_that_is_not_there(choice):
    with pytest.raises(RequestError, match="'weather', 'clock'") as caught:
        chat(tools=TOOLS, tool_choice=choice).sampling_params()
    assert caught.value.param == "tool_choice"


def test_names_must_differ_and_be_there():
    for tools in ([WEATHER, WEATHER], [named("")]):
        with pytest.raises(RequestError, match="must differ and not be empty") as caught:
            chat(tools=tools).sampling_params()
        assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "custom", "custom": {"name": "x"}}]),
        ("tools", [{"type": "function"}]),
        ("tools", [{"type": "function", "function": {"name": 5}}]),
        ("tools", {}),
        ("tool_choice", "any"),
        ("tool_choice", {"type": "custom", "custom": {"name": "x"}}),
        ("tool_choice", {"type": "function", "name": "clock"}),
        ("parallel_tool_calls", "no"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", "json"),
        ("structured_outputs", {"jsn": {}}),
    ],
)
def test_wrong_types(field, value):
    with pytest.raises(RequestError) as caught:
        chat(**{field: value})
    assert caught.value.param == field


def test_the_template_sees_what_it_needs():
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True}, "extra": 1}
    assert chat(tools=[tool]).tool_use().for_template() == [WEATHER]
    assert chat(tools=[named("f")]).tool_use().for_template() == [named("f")]


def past_call(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ('{"a": [1, "x"]}', {"a": [1, "x"]}),
        ("{}", {}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("", ""),
        ("[" * 100_000, "[" * 100_000),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_past_arguments_become_an_object_where_they_are_one(arguments, seen):
    (message,) = chat(messages=[past_call(arguments)]).messages
    (call,) = message.for_template()["tool_calls"]
    assert call == {"id": "1", "type": "function", "function": {"name": "f", "arguments": seen}}


def test_templates_write_past_arguments_as_the_model_did():
    template = (
        "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
    )
    tokenizer = marked_tokenizer(template=template)
    (prompt,) = chat(messages=[past_call('{"a": "ü"}')]).prompts(tokenizer)
    assert tokenizer.decode(prompt.token_ids) == '{"a": "ü"}'


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_past_reasoning_reaches_the_template(name):
    tokenizer = marked_tokenizer(template="{{ messages[0].reasoning_content }}")
    turn = {"role": "assistant", "content": "x", name: "because"}
    (prompt,) = chat(messages=[turn]).prompts(tokenizer)
    assert tokenizer.decode(prompt.token_ids) == "because"


def test_reasoning_effort_reaches_the_template():
    tokenizer = marked_tokenizer(template="{{ reasoning_effort }}")
    (prompt,) = chat(reasoning_effort="low").prompts(tokenizer)
    assert tokenizer.decode(prompt.token_ids) == "low"


def test_results_of_tools_are_messages():
    turns = [*USER, past_call("{}"), {"role": "tool", "tool_call_id": "1", "content": "22"}]
    request = convert_body({"messages": turns}, ChatCompletionRequest)
    assert request.messages[-1].for_template() == {
        "role": "tool",
        "content": "22",
        "tool_call_id": "1",
    }
    assert request.prompts(TOKENIZER)

"""Reasoning and tool calls in answers, by response template: whole and streamed alike."""

import json
import logging

import pytest

from jaxserve.protocol import Prompt, RequestError
from jaxserve.protocol.answer_format import AnswerFormat
from jaxserve.protocol.answer_templates import BUILT_IN, detect
from jaxserve.protocol.parts import Reasoning
from tests.protocol.answers import (
    CLOCK,
    WEATHER,
    chat,
    joined_chat,
    output,
    streamed,
    tool,
    whole,
)
from tests.protocol.tokenizers import MARKED, marked_tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TOOLS = {"tools": [WEATHER, CLOCK]}
SEEDS = range(4)


def built_in(name):
    return AnswerFormat(BUILT_IN[name])


def message(text, name="qwen3", reason="stop", **body):
    """The message that a text becomes, the same when it is streamed."""
    request, answer_format = chat(**body), built_in(name)
    result = output(text, reason=reason)
    (choice,) = whole(request, result, answer_format=answer_format)["choices"]
    for seed in SEEDS:
        chunks = streamed(request, result, answer_format=answer_format, seed=seed)
        found = joined_chat(chunks)[0]
        for field in ("content", "reasoning", "reasoning_content", "tool_calls"):
            assert (found["message"].get(field) or None) == (choice["message"].get(field) or None)
        assert found["message"].get("content", "") == (choice["message"]["content"] or "")
        assert found["finish_reason"] == choice["finish_reason"]
    return choice["message"] | {"finish_reason": choice["finish_reason"]}


def calls_of(found):
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in found.get("tool_calls", ())
    ]


class TestReasoning:
    def test_it_is_told_from_content_under_both_names(self):
        found = message("<think>\nfirst\n\nthen\n</think>\n\nHello ")
        assert (found["content"], found["finish_reason"]) == ("Hello ", "stop")
        assert found["reasoning"] == found["reasoning_content"] == "first\n\nthen"

    def test_an_answer_without_it_is_untouched(self):
        text = " \n plain < text </thinking> \n"
        assert message(text)["content"] == text
        assert "reasoning" not in message(text)

    def test_a_cut_one_is_reasoning_only(self):
        found = message("<think>on and o", reason="length")
        assert (found["content"], found["reasoning"]) == ("", "on and o")
        assert found["finish_reason"] == "length"

    def test_it_can_be_left_out(self):
        found = message("<think>secret</think>Hello", include_reasoning=False)
        assert found["content"] == "Hello"
        assert "secret" not in json.dumps(found)

    @pytest.mark.parametrize("special", [True, False])
    def test_a_prompt_may_have_opened_or_closed_it(self, special):
        tokenizer = marked_tokenizer(special=special)
        answer_format = AnswerFormat(BUILT_IN["qwen3"], tokenizer)
        turn = "<|im_start|>assistant\n"
        for begun, ahead, reasoning in [
            (turn, Reasoning.POSSIBLE, None),
            (turn + "<think>\n", Reasoning.OPEN, "so"),
            (turn + "<think>\n\n</think>\n\n", Reasoning.NONE, None),
        ]:
            prompt = Prompt(tokenizer.encode("<|im_start|>user\nhi<think>" + begun), None)
            assert answer_format.reasoning_ahead([prompt]) is ahead
            request, result = chat(), output("so</think>Yes" if reasoning else "Yes")
            body = whole(request, result, prompts=[prompt], answer_format=answer_format)
            assert body["choices"][0]["message"]["content"] == "Yes"
            assert body["choices"][0]["message"].get("reasoning") == reasoning


class TestCalls:
    def test_a_call_is_no_content(self):
        found = message(CALL, **TOOLS)
        assert found["content"] is None
        assert calls_of(found) == [("weather", {"city": "Zürich"})]
        assert found["finish_reason"] == "tool_calls"
        assert found["tool_calls"][0]["type"] == "function"

    def test_several_after_reasoning_and_content(self):
        found = message(f"<think>hm</think>\n\nI look.\n{CALL}\n{CALL}", **TOOLS)
        assert (found["content"], found["reasoning"]) == ("I look.", "hm")
        assert calls_of(found) == [("weather", {"city": "Zürich"})] * 2
        first, second = found["tool_calls"]
        assert first["id"] != second["id"]

    def test_ids_differ_between_samples(self):
        body = whole(chat(n=2, **TOOLS), output(CALL, CALL), answer_format=built_in("hermes"))
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]]
        assert len(set(ids)) == 2

    def test_only_the_first_where_they_may_not_be_parallel(self):
        found = message(CALL + CALL, parallel_tool_calls=False, **TOOLS)
        assert len(calls_of(found)) == 1

    @pytest.mark.parametrize("body", [{}, {"tool_choice": "none", **TOOLS}])
    def test_without_tools_it_is_content(self, body):
        found = message(CALL, **body)
        assert (found["content"], found["finish_reason"]) == (CALL, "stop")
        assert "tool_calls" not in found

    @pytest.mark.parametrize(
        "text",
        [
            CALL.replace("}}", "}"),
            CALL[:40],
            "<tool_call>",
            "<tool_call></tool_call>",
            "<tool_call>[]x</tool_call>",
            "<tool_call>7</tool_call>",
            '<tool_call>{"arguments": {}}</tool_call>',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
            '<tool_call>{"name": "f", "arguments": ' + "[" * 10_000 + "</tool_call>",
        ],
    )
    def test_what_is_no_call_stays_content_to_the_letter(self, text):
        found = message(f"Look: \n{text}", **TOOLS)
        assert found["content"] == f"Look: \n{text}"
        assert "tool_calls" not in found
        assert found["finish_reason"] == "stop"

    def test_a_call_without_its_closing_mark_counts(self):
        assert calls_of(message(CALL.removesuffix("\n</tool_call>"), **TOOLS)) != []

    def test_arguments_are_json_whatever_they_hold(self):
        text = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800 \\u00fc", "b": [1.5]}}'
        ((_, arguments),) = calls_of(message(text, tools=[tool("f")]))
        assert arguments == {"a": "\ud800 ü", "b": [1.5]}

    def test_several_in_one_mark(self):
        text = '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>'
        assert calls_of(message(text, **TOOLS)) == [("f", {}), ("g", {})]

    def test_xml_calls_take_types_from_the_schema(self):
        text = (
            "Sure.\n<tool_call>\n<function=clock>\n<parameter=hours>\n12\n</parameter>\n"
            "<parameter=zone>\nutc\n</parameter>\n</function>\n</tool_call>"
        )
        found = message(text, "qwen3-coder", **TOOLS)
        assert found["content"] == "Sure."
        assert calls_of(found) == [("clock", {"hours": 12, "zone": "utc"})]

    @pytest.mark.parametrize("first", ["", "<|python_tag|>", "\n"])
    def test_llama_calls_are_the_whole_answer(self, first):
        text = first + '{"name": "weather", "parameters": {"city": "Rome"}}'
        assert calls_of(message(text, "llama3-json", **TOOLS)) == [("weather", {"city": "Rome"})]
        assert calls_of(message("It is " + text, "llama3-json", **TOOLS)) == []

    def test_a_model_without_a_format_gives_content(self):
        body = whole(chat(**TOOLS), output(CALL))
        assert body["choices"][0]["message"]["content"] == CALL

    def test_a_cut_answer_stays_cut(self):
        assert message(f"{CALL}\n<tool_c", reason="length", **TOOLS)["finish_reason"] == "length"


def test_a_template_that_cannot_read_an_answer_loses_nothing():
    picky = {
        "start_anchor": "x",
        "fields": {
            "thinking": {"open_pattern": "<(?P<tag>[a-z]+)>", "close": "</", "transform": "{tag}"},
            "content": {"content": "json", "optional": False},
        },
    }
    for text in ("no json", "<a>b</c"):
        (choice,) = whole(chat(), output(text), answer_format=AnswerFormat(picky))["choices"]
        found = choice["message"]
        assert found["content"] == ("c" if "<" in text else text)
        assert found.get("reasoning") == ("b" if "<" in text else None)


class TestSpecialTokens:
    def test_they_are_asked_for_only_where_they_mark_something(self):
        for special in (True, False):
            answer_format = AnswerFormat(BUILT_IN["qwen3"], marked_tokenizer(special=special))
            assert answer_format.needs_special_tokens is special
            params = chat(**TOOLS).sampling_params(answer_format)
            assert params.skip_special_tokens is not special

    def test_those_that_mark_nothing_are_left_out_unless_wanted(self):
        answer_format = AnswerFormat(BUILT_IN["qwen3"], marked_tokenizer(special=True))
        result = output(f"<think>a<|im_start|>b</think>c<|im_end|>d{CALL}")
        for skips, reasoning, content in [
            (None, "ab", "cd"),
            (False, "a<|im_start|>b", "c<|im_end|>d"),
        ]:
            request = chat(skip_special_tokens=skips, **TOOLS)
            body = whole(request, result, answer_format=answer_format)
            found = body["choices"][0]["message"]
            assert (found["reasoning"], found["content"]) == (reasoning, content)
            assert len(found["tool_calls"]) == 1


class TestChoice:
    @pytest.mark.parametrize(
        ("text", "fields"),
        [
            (None, None),
            ("{{ messages }}", None),
            ("x <tool_call> y", {"tool_calls", "content"}),
            ("<think></think> <tool_call>", {"reasoning_content", "tool_calls", "content"}),
            ("{% if '</think>' in content %}", {"reasoning_content", "content"}),
            ("<|python_tag|>", {"tool_calls", "content"}),
        ],
    )
    def test_chat_templates_show_the_format(self, text, fields):
        found = detect(text)
        assert (None if found is None else set(found["fields"])) == fields

    def test_xml_is_told_from_json(self):
        assert detect("<tool_call>\n<function=")["fields"]["tool_calls"]["content"] == "xml-inline"
        assert detect("<tool_call>\n{{ x }}")["fields"]["tool_calls"]["content"] == "json"

    def test_the_tokenizer_comes_before_its_chat_template(self):
        own = BUILT_IN["think"]
        tokenizer = marked_tokenizer({"response_template": own}, template="<tool_call>")
        assert AnswerFormat.choose("auto", tokenizer).template == own
        assert AnswerFormat.choose(None, tokenizer).template == own
        tokenizer = marked_tokenizer(template="<tool_call>")
        assert AnswerFormat.choose("auto", tokenizer).template == BUILT_IN["hermes"]
        assert AnswerFormat.choose("auto", marked_tokenizer(template="{{ x }}")) is None
        assert AnswerFormat.choose("none", tokenizer) is None
        assert AnswerFormat.choose("qwen3", tokenizer).template == BUILT_IN["qwen3"]

    def test_a_file(self, tmp_path):
        path = tmp_path / "template.json"
        path.write_text(json.dumps(BUILT_IN["llama3-json"]))
        found = AnswerFormat.choose(str(path), marked_tokenizer())
        assert found.template == BUILT_IN["llama3-json"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "neither a file nor one of auto, none, .*hermes"),
            ("{", "not valid JSON"),
            ("[]", "not a JSON object"),
            ("{}", "fields"),
            ('{"fields": {"content": {}}}', "start_anchor"),
        ],
    )
    def test_bad_ones_are_refused(self, tmp_path, content, message):
        path = tmp_path / "template.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=message):
            AnswerFormat.choose(str(path), marked_tokenizer())


def test_transformers_gives_no_advice(caplog):
    with caplog.at_level(logging.DEBUG, "transformers"):
        message(CALL, **TOOLS)
    assert not [record for record in caplog.records if "PyTorch" in record.message]


def test_marks_are_those_of_the_tokenizer():
    tokenizer = marked_tokenizer(special=False)
    marks = AnswerFormat(BUILT_IN["hermes"], tokenizer).marks
    think = tokenizer.backend.token_to_id("<think>")
    assert set(MARKED) <= set(marks.ids)
    assert marks.lark('<think>\n"a"') == f'<[{think}]> "\\n\\"a\\""'
    assert marks.lark("") == '""'


@pytest.mark.parametrize("name", ["qwen3-coder", "qwen3.5", "think"])
def test_where_calls_cannot_be_enforced_in_a_models_own_format_they_are_a_list(name):
    text = '[{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {"zone": "x"}}]'
    reasoning = "" if name == "qwen3-coder" else "<think>Why?</think>\n"
    found = message(reasoning + text, name, tool_choice="required", **TOOLS)
    assert calls_of(found) == [("clock", {}), ("clock", {"zone": "x"})]
    assert (found["content"], found.get("reasoning")) == (None, "Why?" if reasoning else None)
    # Free calls are still read in the format of the model.
    found = message(reasoning + text, name, **TOOLS)
    assert not calls_of(found)


def test_calls_that_a_format_takes_for_reasoning_are_refused():
    everything = {"open_pattern": r"\A", "close": "</think>", "content": "text"}
    fields = {"reasoning_content": everything, "content": {"content": "text"}}
    swallows = AnswerFormat({"start_anchor": "x", "fields": fields})
    request = chat(tools=[tool("f")], tool_choice="required")
    with pytest.raises(RequestError, match="cannot be told from reasoning") as caught:
        request.sampling_params(swallows)
    assert caught.value.param == "tool_choice"

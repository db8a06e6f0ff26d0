"""OpenAI request bodies: types, conversion, and the answers built from outputs."""

import msgspec
import pytest

from jaxserve.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxserve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Prompt,
    RequestError,
    check_model,
    convert_body,
    error_body,
    request_error,
    response_body,
)
from jaxserve.sampling_params import SamplingParams
from tests.cli.fakes import FakeTokenizer

TOKENIZER = FakeTokenizer()
PROMPTS = (Prompt([104, 105], "hi"),)
USER = [{"role": "user", "content": "hi"}]


def completion(**body):
    return convert_body({"prompt": "x", **body}, CompletionRequest)


def chat(**body):
    return convert_body({"messages": USER, **body}, ChatCompletionRequest)


@pytest.mark.parametrize("make", [completion, chat])
class TestBothEndpoints:
    def test_a_null_is_an_absent_field(self, make):
        names = [field.name for field in msgspec.structs.fields(type(make()))]
        nulls = dict.fromkeys(set(names) - {"prompt", "messages"})
        assert make(**nulls).sampling_params() == make().sampling_params()

    def test_unknown_fields_are_ignored(self, make):
        assert make(store=True, metadata={"a": 1}, no_such_thing=[1]) == make()

    def test_shared_fields_reach_the_sampler(self, make):
        fields = {
            "n": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "seed": 4,
            "stop": ["a"],
            "logit_bias": {"5": 10},
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.5,
            "stop_token_ids": [7],
            "ignore_eos": True,
            "max_tokens": 20,
            "min_tokens": 2,
            "allowed_token_ids": [5, 6],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
        }
        assert make(**fields).sampling_params() == SamplingParams(**fields)

    @pytest.mark.parametrize(
        "field",
        ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "n", "top_k"],
    )
    @pytest.mark.parametrize("value", ["0.5", True, [], {}])
    def test_another_type_is_an_error_that_names_the_field(self, make, field, value):
        with pytest.raises(RequestError, match=f"^{field}: Expected") as caught:
            make(**{field: value})
        assert caught.value.param == field
        assert caught.value.status == 400

    @pytest.mark.parametrize("field", ["n", "top_k", "seed", "max_tokens", "min_tokens"])
    def test_a_fraction_is_no_integer(self, make, field):
        for value in (1.5, 1.0):
            with pytest.raises(RequestError) as caught:
                make(**{field: value})
            assert caught.value.param == field

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -1),
            ("top_p", 1.5),
            ("min_p", -0.1),
            ("presence_penalty", 3),
            ("top_k", -2),
            ("n", 0),
            ("max_tokens", -1),
            ("stop", ""),
            ("stop", ["a", ""]),
            ("logit_bias", {"abc": 1}),
            ("logit_bias", {"5": 1000}),
            ("allowed_token_ids", []),
            ("min_tokens", 10**9),
        ],
    )
    def test_out_of_range_names_the_field(self, make, field, value):
        with pytest.raises(RequestError, match=field) as caught:
            make(max_tokens=5, **{field: value}).sampling_params() if field != "max_tokens" else (
                make(max_tokens=value).sampling_params()
            )
        assert caught.value.param == field

    def test_model_must_be_the_served_one(self, make):
        check_model(make(), ("m",))
        check_model(make(model="m"), ("m",))
        with pytest.raises(RequestError, match="'nope'") as caught:
            check_model(make(model="nope"), ("m",))
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")


class TestCompletion:
    @pytest.mark.parametrize(
        ("prompt", "ids"),
        [
            ("ab", [[97, 98]]),
            (["ab", "c"], [[97, 98], [99]]),
            ([1, 2], [[1, 2]]),
            ([[1, 2], [3]], [[1, 2], [3]]),
        ],
    )
    def test_forms_of_the_prompt(self, prompt, ids):
        found = completion(prompt=prompt).prompts(TOKENIZER)
        assert [item.token_ids for item in found] == ids

    @pytest.mark.parametrize("prompt", ["", [""], [], ["", "a"], [[]], [1, "a"], ["a", [1]]])
    def test_bad_prompts(self, prompt):
        with pytest.raises(RequestError) as caught:
            completion(prompt=prompt).prompts(TOKENIZER)
        assert caught.value.param == "prompt"

    @pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": 5}, {"prompt": [1.5]}])
    def test_wrong_type_of_prompt(self, body):
        with pytest.raises(RequestError) as caught:
            convert_body(body, CompletionRequest)
        assert caught.value.param == "prompt"

    def test_token_limits(self):
        assert completion().sampling_params().max_tokens == 16
        assert completion(max_tokens=3).sampling_params().max_tokens == 3

    def test_echo_scores_the_prompt(self):
        params = completion(echo=True, max_tokens=0, logprobs=1).sampling_params()
        assert (params.max_tokens, params.prompt_logprobs) == (0, 1)
        assert completion(echo=True, max_tokens=0).sampling_params().prompt_logprobs == 0
        assert completion(echo=True).sampling_params().prompt_logprobs is None
        with pytest.raises(RequestError, match="only with echo"):
            completion(max_tokens=0).sampling_params()

    @pytest.mark.parametrize(("field", "value"), [("suffix", "z"), ("best_of", 3)])
    def test_unsupported(self, field, value):
        with pytest.raises(RequestError) as caught:
            completion(**{field: value}).sampling_params()
        assert caught.value.param == field
        completion(suffix="", best_of=2, n=2).sampling_params()


class TestChat:
    def test_token_limits(self):
        assert chat().sampling_params().max_tokens is None
        assert chat(max_tokens=9).sampling_params().max_tokens == 9
        both = chat(max_tokens=9, max_completion_tokens=5)
        assert both.sampling_params().max_tokens == 5

    def test_logprobs(self):
        assert chat().sampling_params().logprobs is None
        assert chat(logprobs=True).sampling_params().logprobs == 0
        assert chat(logprobs=True, top_logprobs=3).sampling_params().logprobs == 3
        with pytest.raises(RequestError, match="top_logprobs needs"):
            chat(top_logprobs=3).sampling_params()

    def test_parts_are_joined_with_nothing_between(self):
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        whole, split = chat(), chat(messages=[{"role": "user", "content": parts}])
        assert split.prompts(TOKENIZER) == whole.prompts(TOKENIZER)

    def test_developer_is_system(self):
        developer = chat(messages=[{"role": "developer", "content": "be"}, *USER])
        system = chat(messages=[{"role": "system", "content": "be"}, *USER])
        assert developer.prompts(TOKENIZER) == system.prompts(TOKENIZER)

    @pytest.mark.parametrize(
        "messages",
        [
            [],
            [{"role": "user", "content": []}],
            [{"role": "user", "content": None}],
            [{"role": "user"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
        ],
    )
    def test_bad_content(self, messages):
        with pytest.raises(RequestError) as caught:
            chat(messages=messages).prompts(TOKENIZER)
        assert caught.value.param == "messages"

    @pytest.mark.parametrize(
        "messages",
        [
            None,
            "hi",
            [{"content": "x"}],
            [{"role": "emperor", "content": "x"}],
            [{"role": "user", "content": [{"text": "no type"}]}],
            [{"role": "user", "content": 5}],
        ],
    )
    def test_wrong_types(self, messages):
        with pytest.raises(RequestError) as caught:
            chat(messages=messages)
        assert caught.value.param == "messages"

    def test_an_assistant_turn_with_tool_calls_needs_no_content(self):
        turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
        (message,) = chat(messages=[turn]).messages
        assert message.for_template() == {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1"}],
        }

    def test_template_arguments(self):
        plain = chat().prompts(TOKENIZER)[0].token_ids
        without = chat(add_generation_prompt=False).prompts(TOKENIZER)[0].token_ids
        assert plain == [*without, 256]
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert chat(tools=tools).prompts(TOKENIZER)[0].token_ids != plain
        assert chat(tools=tools, tool_choice="none").prompts(TOKENIZER)[0].token_ids == plain
        with pytest.raises(RequestError, match="'tools'"):
            chat(chat_template_kwargs={"tools": []}).prompts(TOKENIZER)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("functions", []),
            ("function_call", "auto"),
            ("modalities", ["text", "audio"]),
            ("audio", {"voice": "v"}),
            ("web_search_options", {}),
            ("continue_final_message", True),
            ("chat_template", "{{ messages }}"),
            ("documents", [{"text": "x"}]),
        ],
    )
    def test_unsupported(self, field, value):
        with pytest.raises(RequestError, match=field) as caught:
            chat(**{field: value}).sampling_params()
        assert caught.value.param == field
        chat(response_format={"type": "text"}, modalities=["text"]).sampling_params()


def position(token, rank, *others):
    """The sampled token at its rank, and the others from rank 1 on."""
    entry = {token: Logprob(-float(rank), rank, chr(token))}
    for other_rank, other in enumerate(others, start=1):
        entry.setdefault(other, Logprob(-float(other_rank), other_rank, chr(other)))
    return entry


def output(token_ids, logprobs, *, prompt_ids=(104, 105), prompt_logprobs=None, n=1):
    text = "".join(map(chr, token_ids))
    samples = [
        CompletionOutput(i, text, list(token_ids), None, logprobs, "length") for i in range(n)
    ]
    metrics = RequestMetrics(0.0, num_cached_tokens=1)
    return RequestOutput("r", None, list(prompt_ids), prompt_logprobs, samples, True, metrics)


def body(request, *outputs, prompts=PROMPTS):
    built = response_body(
        request, list(prompts), list(outputs), TOKENIZER, response_id="7", model="m", created=3
    )
    return msgspec.to_builtins(built)


def test_chat_response():
    found = body(chat(n=2), output([97, 98], None, n=2))
    assert found["id"] == "chatcmpl-7"
    assert (found["object"], found["model"], found["created"]) == ("chat.completion", "m", 3)
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    first = found["choices"][0]
    assert first["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert (first["finish_reason"], first["logprobs"]) == ("length", None)
    assert found["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize(
    ("num_top", "sampled", "top"),
    [
        (0, position(97, 1), []),
        (0, position(97, 40), []),
        (2, position(97, 1, 97, 98), ["a", "b"]),
        (2, position(97, 2, 98, 97), ["b", "a"]),
        (2, position(97, 40, 98, 99), ["b", "c"]),
    ],
)
def test_chat_logprobs(num_top, sampled, top):
    request = chat(logprobs=True, top_logprobs=num_top)
    (entry,) = body(request, output([97], [sampled]))["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "a"
    assert entry["bytes"] == [97]
    assert entry["logprob"] == sampled[97].logprob
    assert [candidate["token"] for candidate in entry["top_logprobs"]] == top


def test_bytes_of_tokens_add_up_where_their_texts_do_not():
    ids = list("é".encode())
    positions = [{token: Logprob(-1.0, 1, "\ufffd")} for token in ids]
    request = chat(logprobs=True, top_logprobs=1)
    content = body(request, output(ids, positions))["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["\ufffd"] * 2
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é"
    assert [entry["top_logprobs"][0]["bytes"] for entry in content] == [[byte] for byte in ids]


def test_completion_logprobs_have_equal_lengths():
    positions = [position(97, 40, 98, 99), position(98, 1, 98, 97)]
    found = body(completion(logprobs=2), output([97, 98], positions))["choices"][0]["logprobs"]
    assert found == {
        "tokens": ["a", "b"],
        "token_logprobs": [-40.0, -1.0],
        "top_logprobs": [{"a": -40.0, "b": -1.0, "c": -2.0}, {"b": -1.0, "a": -2.0}],
        "text_offset": [0, 1],
    }


def test_echo_puts_the_prompt_in_front_of_text_and_logprobs():
    request = completion(prompt="hi", echo=True, logprobs=0)
    answer = output([97], [position(97, 1)], prompt_logprobs=[None, position(105, 3)])
    (choice,) = body(request, answer)["choices"]
    assert choice["text"] == "hia"
    assert choice["logprobs"]["tokens"] == ["h", "i", "a"]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -1.0]
    assert choice["logprobs"]["top_logprobs"][0] is None


def test_echo_without_new_tokens_is_the_prompt_scored():
    request = completion(prompt="hi", echo=True, logprobs=1, max_tokens=0)
    answer = output([], [], prompt_logprobs=[None, position(105, 3, 97)])
    found = body(request, answer)
    (choice,) = found["choices"]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0]
    assert found["usage"]["completion_tokens"] == 0


def test_choices_of_several_prompts_are_numbered_through():
    outputs = [output([97], None, n=2), output([98], None, n=2)]
    prompts = [Prompt([104], "h"), Prompt([105], "i")]
    found = body(completion(prompt=["h", "i"], n=2), *outputs, prompts=prompts)
    assert [(choice["index"], choice["text"]) for choice in found["choices"]] == [
        (0, "a"),
        (1, "a"),
        (2, "b"),
        (3, "b"),
    ]
    assert found["id"] == "cmpl-7"


def test_error_objects():
    assert error_body("no", 400, "n", "invalid_value") == {
        "error": {
            "message": "no",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }
    assert error_body("no", 404, None, None)["error"]["type"] == "not_found_error"
    assert error_body("no", 500, None, None)["error"]["type"] == "server_error"


def test_errors_of_the_engine_keep_their_field():
    assert request_error(ValueError("logit_bias has token id 9")).param == "logit_bias"
    assert request_error(ValueError("the prompt is too long")).param is None
    original = RequestError("x", "n")
    assert request_error(original) is original

"""Requests and answers against the types of the `openai` package."""

import typing

import msgspec
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from jaxserve.protocol import ChatCompletionRequest, CompletionRequest, convert_body
from jaxserve.protocol.answer_format import AnswerFormat
from jaxserve.protocol.answer_templates import BUILT_IN
from jaxserve.protocol.ignored import IGNORED
from tests.protocol.answers import WEATHER, chat, completion, output, streamed, whole

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "x"}}\n</tool_call>'
FORMAT = AnswerFormat(BUILT_IN["qwen3"])


@pytest.mark.parametrize(
    ("kind", "params"), [(ChatCompletionRequest, ChatParams), (CompletionRequest, CompletionParams)]
)
def test_every_field_of_openai_is_known_or_listed(kind, params):
    theirs = set(typing.get_type_hints(params)) | {"stream"}
    ours = {field.name for field in msgspec.structs.fields(kind)}
    assert theirs - ours <= set(IGNORED)
    assert not ours & set(IGNORED)


def test_listed_fields_make_no_difference():
    listed = dict.fromkeys(IGNORED, "x")
    assert chat(**listed) == chat()
    assert completion(**listed) == completion()


CHATS = [
    (chat(), output("hello"), None),
    (chat(n=2), output("hello", "you", reason="length"), None),
    (chat(logprobs=True, top_logprobs=2), output("hi", logprobs=True), None),
    (chat(tools=[WEATHER]), output(f"<think>a</think>b{CALL}\n{CALL}"), FORMAT),
    (chat(tools=[WEATHER]), output(CALL), FORMAT),
]


@pytest.mark.parametrize(("request_", "result", "answer_format"), CHATS)
def test_chat_answers_are_valid(request_, result, answer_format):
    body = whole(request_, result, answer_format=answer_format)
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert parsed.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + parsed.usage.completion_tokens


@pytest.mark.parametrize(("request_", "result", "answer_format"), CHATS)
def test_chat_chunks_are_valid(request_, result, answer_format):
    request_ = msgspec.structs.replace(
        request_, stream_options=convert_options(continuous_usage_stats=True, include_usage=True)
    )
    for chunk in streamed(request_, result, answer_format=answer_format):
        ChatCompletionChunk.model_validate(chunk, strict=True)


def convert_options(**options):
    return convert_body(
        {"messages": [], "stream_options": options}, ChatCompletionRequest
    ).stream_options


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        (completion(), output("hello")),
        (completion(n=2), output("hello", "you", reason="length")),
        (completion(logprobs=2), output("hi", logprobs=True)),
    ],
)
def test_completion_answers_are_valid(request_, result):
    Completion.model_validate(whole(request_, result), strict=True)
    for chunk in streamed(request_, result):
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # their type has no null
        Completion.model_validate(chunk, strict=True)


def test_reasoning_is_an_extra_field_to_the_client():
    (request, result, answer_format) = CHATS[3]
    parsed = ChatCompletion.model_validate(whole(request, result, answer_format=answer_format))
    message = parsed.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("b", "a", "a")
    assert [call.function.name for call in message.tool_calls] == ["weather", "weather"]

"""The `openai` client against a real server: streaming and not, tools, structured output.

The model's weights are random, so a test that needs a certain answer leaves it no other, by a
grammar or by `logit_bias`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, Field

from jaxserve.protocol.marks import Marks
from tests.server.model import ADDED, END_THINK, IM_END, THINK, byte_tokenizer, make_model
from tests.server.process import ServerProcess

TEMPLATE = """
{%- if tools %}<|im_start|>system
{{ tools | map(attribute="function.name") | join(" ") }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
MARKS = Marks({text: THINK + index for index, text in enumerate(ADDED)})
ENDS_SOON = {str(IM_END): 100}
HI: Any = [{"role": "user", "content": "hi"}]


def tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("weather", city={"enum": ["Rome", "Zürich"]}, days={"enum": [1, 2, 3]})
CLOCK = tool("clock", zone={"enum": ["utc", "local"]})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
TOOLS: dict[str, Any] = {"tools": [WEATHER, CLOCK]}
NAMED: Any = {"type": "function", "function": {"name": "clock"}}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory, server_cache: Path) -> Iterator[ServerProcess]:
    """A server of a model that may reason and call tools."""
    model = make_model(tmp_path_factory.mktemp("models") / "talker", template=TEMPLATE)
    with ServerProcess(model, cache=server_cache) as process:
        yield process


@pytest.fixture
def ai(talker: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=talker.base_url, api_key="none", max_retries=0) as ai:
        yield ai


def saying(text: str) -> dict[str, Any]:
    """What leaves the model no answer but `text`, marks included."""
    return {"extra_body": {"structured_outputs": {"grammar": f"start: {MARKS.lark(text)}\n"}}}


def joined(chunks: Iterator[ChatCompletionChunk]) -> dict[int, dict[str, Any]]:
    """Samples as a client puts them together, with the chunks' usage as sample -1."""
    samples: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
        if chunk.usage is not None:
            assert not chunk.choices
            samples[-1] = {"usage": chunk.usage}
        for choice in chunk.choices:
            sample = samples.setdefault(
                choice.index,
                {"content": "", "reasoning": "", "calls": [], "logprobs": [], "reason": None},
            )
            assert sample["reason"] is None
            sample["reason"] = choice.finish_reason
            sample["content"] += choice.delta.content or ""
            sample["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            if choice.logprobs is not None:
                sample["logprobs"] += choice.logprobs.content or []
            for call in choice.delta.tool_calls or ():
                assert call.index == len(sample["calls"])
                assert call.function is not None
                sample["calls"].append((call.function.name, call.function.arguments))
    return samples


def both_ways(ai: openai.OpenAI, **request: Any) -> Any:
    """The message and finish reason of an answer, the same when it is streamed."""
    body: Any = {"model": "talker", "messages": HI, "seed": 5, "max_tokens": 200, **request}
    whole = ai.chat.completions.create(**body)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    (choice,) = whole.choices
    sample = joined(ai.chat.completions.create(**body, stream=True))[0]
    message = choice.message
    assert sample["content"] == (message.content or "")
    assert sample["reasoning"] == getattr(message, "reasoning_content", "")
    assert sample["reason"] == choice.finish_reason
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]  # type: ignore[union-attr]
    assert sample["calls"] == calls
    return message, choice.finish_reason, [(name, json.loads(text)) for name, text in calls]


class TestChat:
    def test_three_samples_with_logprobs(self, ai: openai.OpenAI) -> None:
        body: Any = {
            "model": "talker",
            "messages": HI,
            "n": 3,
            "seed": 7,
            "max_tokens": 12,
            "logprobs": True,
            "top_logprobs": 3,
        }
        whole = ai.chat.completions.create(**body)
        ChatCompletion.model_validate(whole.model_dump(), strict=True)
        options: Any = {"include_usage": True}
        samples = joined(ai.chat.completions.create(**body, stream=True, stream_options=options))
        assert samples.pop(-1)["usage"].total_tokens == whole.usage.total_tokens
        assert len(samples) == len(whole.choices) == 3
        assert len({choice.message.content for choice in whole.choices}) == 3
        for choice in whole.choices:
            sample = samples[choice.index]
            assert sample["content"] == choice.message.content
            assert sample["reason"] == choice.finish_reason
            found = [(entry.token, entry.logprob) for entry in sample["logprobs"]]
            assert choice.logprobs is not None
            entries = choice.logprobs.content or []
            assert found == [(entry.token, pytest.approx(entry.logprob)) for entry in entries]
            assert all(len(entry.top_logprobs) == 3 for entry in entries)

    def test_reasoning_is_an_extra_field(self, ai: openai.OpenAI) -> None:
        message, reason, _ = both_ways(ai, **saying("<think>\nwell, hm\n</think>\n\nHello!"))
        assert (message.content, reason) == ("Hello!", "stop")
        assert message.reasoning == message.reasoning_content == "well, hm"

    def test_many_streams_at_once(self, talker: ServerProcess) -> None:
        async def all_texts() -> list[str]:
            async with openai.AsyncOpenAI(base_url=talker.base_url, api_key="none") as ai:
                return await asyncio.gather(*(text(ai, f"number {i}") for i in range(12)))

        async def text(ai: openai.AsyncOpenAI, words: str) -> str:
            stream = await ai.chat.completions.create(
                model="talker", messages=HI, stream=True, **saying(words)
            )
            return "".join(
                [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
            )

        assert asyncio.run(all_texts()) == [f"number {i}" for i in range(12)]


class TestCompletions:
    def test_samples_of_several_prompts(self, ai: openai.OpenAI) -> None:
        body: Any = {
            "model": "talker",
            "prompt": ["one", "two"],
            "n": 3,
            "seed": 3,
            "max_tokens": 8,
            "logprobs": 2,
        }
        whole = ai.completions.create(**body)
        texts = {choice.index: "" for choice in whole.choices}
        logprobs: dict[int, list[float]] = {index: [] for index in texts}
        for chunk in ai.completions.create(**body, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                assert choice.logprobs is not None
                logprobs[choice.index] += choice.logprobs.token_logprobs or []
        assert texts == {choice.index: choice.text for choice in whole.choices}
        assert len(texts) == 6
        for choice in whole.choices:
            assert choice.logprobs is not None
            assert logprobs[choice.index] == pytest.approx(choice.logprobs.token_logprobs)

    def test_an_echoed_prompt_is_scored(self, ai: openai.OpenAI) -> None:
        body: Any = {"model": "talker", "prompt": "score", "max_tokens": 0, "echo": True}
        (whole,) = ai.completions.create(**body, logprobs=1).choices
        (chunk,) = ai.completions.create(**body, logprobs=1, stream=True)
        for choice in (whole, *chunk.choices):
            assert choice.text == "score"
            assert choice.logprobs is not None
            first, *others = choice.logprobs.token_logprobs or []
            assert first is None
            assert len(others) == 4
            assert all(value < 0 for value in others)
            assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]


def test_token_ids_can_be_replayed(ai: openai.OpenAI) -> None:
    """What a trainer needs: the ids of prompt and sample, whole and streamed."""
    body: Any = {"model": "talker", "seed": 4, "max_tokens": 20}
    body["extra_body"] = {"return_token_ids": True, "ignore_eos": True}
    chat: Any = ai.chat.completions.create(messages=HI, **body)
    ids = chat.choices[0].token_ids
    assert len(ids) == chat.usage.completion_tokens == 20
    assert len(chat.prompt_token_ids) == chat.usage.prompt_tokens
    again: Any = ai.completions.create(prompt=chat.prompt_token_ids, **body)
    (choice,) = again.choices
    assert (choice.prompt_token_ids, choice.token_ids) == (chat.prompt_token_ids, ids)
    first, *others = ai.chat.completions.create(messages=HI, **body, stream=True)
    assert getattr(first, "prompt_token_ids") == chat.prompt_token_ids  # noqa: B009
    pieces: Any = [choice for chunk in others for choice in chunk.choices]
    assert [token for piece in pieces for token in piece.token_ids] == ids


class TestTools:
    def test_calls_of_the_models_own_accord(self, ai: openai.OpenAI) -> None:
        text = f"<think>look</think>\n\nI look it up.\n{CALL}\n{CALL}"
        message, reason, calls = both_ways(ai, **saying(text), **TOOLS)
        assert (message.content, message.reasoning) == ("I look it up.", "look")
        assert calls == [("weather", {"city": "Zürich", "days": 2})] * 2
        assert reason == "tool_calls"

    def test_one_call_where_they_may_not_be_parallel(self, ai: openai.OpenAI) -> None:
        said = saying(f"{CALL}\n{CALL}")
        _, _, calls = both_ways(ai, **said, **TOOLS, parallel_tool_calls=False)
        assert len(calls) == 1

    def test_no_calls_where_they_are_not_wanted(self, ai: openai.OpenAI) -> None:
        message, reason, calls = both_ways(ai, **saying(CALL), **TOOLS, tool_choice="none")
        assert (message.content, reason, calls) == (CALL, "stop", [])

    def test_what_is_no_call_is_content(self, ai: openai.OpenAI) -> None:
        broken = CALL.replace("}}", "}")
        message, _, calls = both_ways(ai, **saying(broken), **TOOLS)
        assert (message.content, calls) == (broken, [])

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("thinks", [True, False])
    def test_calls_are_enforced(self, ai: openai.OpenAI, seed: int, thinks: bool) -> None:
        # A model that likes to reason does so, briefly, before the call that it has to make.
        likes = {str(THINK): 50, str(END_THINK): 100} if thinks else {}
        kwargs = {"chat_template_kwargs": {"enable_thinking": thinks}}
        for choice, names in [("required", {"weather", "clock"}), (NAMED, {"clock"})]:
            message, reason, calls = both_ways(
                ai,
                **TOOLS,
                seed=seed,
                temperature=2.0,
                tool_choice=choice,
                logit_bias={**ENDS_SOON, **likes},
                extra_body=kwargs,
            )
            assert message.content is None
            ((name, arguments),) = calls
            assert name in names
            if name == "clock":
                assert arguments["zone"] in ("utc", "local")
            else:
                assert arguments["city"] in ("Rome", "Zürich")
                assert arguments["days"] in (1, 2, 3)
            assert reason == ("tool_calls" if choice == "required" else "stop")

    def test_enforced_without_a_format_of_the_models_own(self, server: ServerProcess) -> None:
        with openai.OpenAI(base_url=server.base_url, api_key="none") as ai:
            message, reason, calls = both_ways(
                ai, model="tiny", **TOOLS, tool_choice="required", logit_bias={str(ord("]")): 100}
            )
        assert (message.content, reason) == (None, "tool_calls")
        assert len(calls) == 1

    def test_a_loop(self, ai: openai.OpenAI) -> None:
        body: Any = {"model": "talker", **TOOLS}
        asked = ai.chat.completions.create(messages=HI, **saying(CALL), **body)
        turn = asked.choices[0].message
        assert turn.tool_calls is not None
        result = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "sunny"}
        messages: Any = [*HI, turn.model_dump(exclude_none=True), result]
        answered = ai.chat.completions.create(messages=messages, **saying("It is sunny."), **body)
        assert answered.choices[0].message.content == "It is sunny."
        assert asked.usage is not None
        assert answered.usage is not None
        # The past call is in the prompt as the model wrote it, its arguments being an object.
        turns = f"{CALL}<|im_end|>\n<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
        grown = answered.usage.prompt_tokens - asked.usage.prompt_tokens
        assert grown == len(byte_tokenizer().encode(turns).ids)


class Report(BaseModel):
    """What the model is asked for."""

    kind: Literal["storm", "sun"]
    level: int = Field(ge=0, le=9)
    tags: list[Literal["a", "b"]] = Field(max_length=2)


class TestStructuredOutput:
    def test_a_model_of_the_clients(self, ai: openai.OpenAI) -> None:
        for seed in range(3):
            parsed = ai.chat.completions.parse(
                model="talker",
                messages=HI,
                response_format=Report,
                seed=seed,
                max_tokens=200,
                logit_bias={str(ord("}")): 50, str(ord(" ")): -100, str(ord("\n")): -100},
                extra_body={"chat_template_kwargs": {"enable_thinking": False}},
            )
            assert isinstance(parsed.choices[0].message.parsed, Report)

    @pytest.mark.parametrize("thinks", [True, False])
    def test_it_may_follow_reasoning(self, ai: openai.OpenAI, thinks: bool) -> None:
        schema = {"enum": ["yes", "no"]}
        likes = {str(THINK): 100, str(END_THINK): 100} if thinks else {str(THINK): -100}
        message, reason, _ = both_ways(
            ai,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            logit_bias=likes,
        )
        assert json.loads(message.content) in ("yes", "no")
        assert reason == "stop"

    @pytest.mark.parametrize(
        ("constraint", "fits"),
        [
            ({"choice": ["red", "green"]}, ["red", "green"]),
            ({"regex": "[ab]{2}/[cd]"}, [f"{x}{y}/{z}" for x in "ab" for y in "ab" for z in "cd"]),
            ({"grammar": 'start: "x" | "y" "z"'}, ["x", "yz"]),
        ],
    )
    def test_vllms_constraints(self, ai: openai.OpenAI, constraint: Any, fits: list[str]) -> None:
        body = {
            "structured_outputs": constraint,
            "chat_template_kwargs": {"enable_thinking": False},
        }
        message, _, _ = both_ways(ai, extra_body=body)
        assert message.content in fits
        done = ai.completions.create(
            model="talker", prompt="x", extra_body={"structured_outputs": constraint}
        )
        assert done.choices[0].text in fits


class TestErrors:
    @pytest.mark.parametrize(
        ("request_", "param"),
        [
            ({"temperature": -1}, "temperature"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"response_format": {"type": "xml"}}, "response_format"),
            ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
            ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
            ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
            ({"extra_body": {"structured_outputs": {"grammar": "x"}}}, "structured_outputs"),
            ({"extra_body": {"structured_outputs": {"json": {"type": 5}}}}, "structured_outputs"),
        ],
    )
    def test_bad_requests(self, ai: openai.OpenAI, request_: Any, param: str) -> None:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                ai.chat.completions.create(model="talker", messages=HI, stream=stream, **request_)
            assert caught.value.param == param
            assert caught.value.type == "invalid_request_error"

    def test_another_model(self, ai: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError, match="'nope' is not served here") as caught:
            ai.chat.completions.create(model="nope", messages=HI)
        assert caught.value.code == "model_not_found"

    def test_the_served_one_is_listed(self, ai: openai.OpenAI) -> None:
        assert [model.id for model in ai.models.list()] == ["talker"]

"""What is refused and how, over HTTP: B34, B35, B36, B37, B39."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.server.process import ServerProcess
from tests.server.requests import (
    CHAT,
    COMPLETIONS,
    ask,
    ask_streamed,
    canary,
    choice_text,
    prepared,
    refused,
)

PATHS = [COMPLETIONS, CHAT]
JSON = {"content-type": "application/json"}
LIMIT = 256


@pytest.fixture(scope="module")
def voice(client_of_module: httpx.Client) -> str:
    return canary(client_of_module)


@pytest.fixture(scope="module")
def client_of_module(server: ServerProcess):
    with server.client() as client:
        yield client


@pytest.fixture(autouse=True)
def unharmed(client: httpx.Client, voice: str):
    """Whatever was asked, the canary sings as before."""
    yield
    assert canary(client) == voice


BAD_BODIES = {
    "invalid JSON": b"{",
    "half a string": b'{"prompt": "x',
    "a list": b"[]",
    "null": b"null",
    "a number": b"3",
    "a text": b'"x"',
    "nothing": b"",
    "blanks": b"  \n ",
    "not UTF-8": b'{"prompt": "\xff"}',
    "a lone surrogate": b'{"prompt": "\\ud800"}',
    "too deep": b"[" * 100_000,
    "deep inside": b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    "an empty object": b"{}",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize", "/abort_request"])
def test_b34_bodies(client: httpx.Client, path: str, body: bytes) -> None:
    refused(client.post(path, content=body, headers=JSON))


WRONG_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "x"]}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [9999]}, "vocabulary"),
    (COMPLETIONS, {"prompt": [-1]}, "vocabulary"),
    (COMPLETIONS, {"prompt": "x", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "x", "stop": 5}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "3"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 10**6}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [10**6]}, "stop_token_ids"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hello"}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "role"),
    (CHAT, {"messages": [{"content": "x"}]}, "role"),
    (CHAT, {"messages": [{"role": "user"}]}, "content"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "stream_options": 3}, "stream_options"),
]


@pytest.mark.parametrize(("path", "body", "word"), WRONG_FIELDS)
def test_b34_fields(client: httpx.Client, path: str, body: dict[str, Any], word: str) -> None:
    refused(client.post(path, json=body), word)
    refused(client.post(path, json={**body, "stream": body.get("stream", True)}), word)


def test_b34_paths_methods_and_types(client: httpx.Client) -> None:
    refused(client.get("/v1/nothing"), status=404)
    refused(client.post("/v1/embeddings", json={}), status=404)
    wrong_method = client.get(COMPLETIONS)
    refused(wrong_method, "GET", status=405)
    assert wrong_method.headers["allow"] == "POST"
    refused(client.delete("/health"), status=405)
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        response = client.post(
            COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": media_type}
        )
        refused(response, media_type, "application/json", status=415)
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    refused(client.post(COMPLETIONS, content=b"x", headers=packed), "gzip", status=415)
    for media_type in ("application/json; charset=utf-8", "Application/JSON"):
        response = client.post(
            COMPLETIONS,
            content=b'{"prompt": "x", "max_tokens": 1}',
            headers={"content-type": media_type},
        )
        assert response.status_code == 200


def test_b34_the_official_client_raises_its_errors(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as api:
        with pytest.raises(openai.BadRequestError, match="temperature=-1"):
            api.completions.create(model="tiny", prompt="x", temperature=-1)
        with pytest.raises(openai.NotFoundError, match="nope"):
            api.completions.create(model="nope", prompt="x")
        with pytest.raises(openai.BadRequestError, match="nothing to answer"):
            api.chat.completions.create(model="tiny", messages=[], stream=True)


def test_b35_max_completion_tokens(client: httpx.Client) -> None:
    def tokens(**body: Any) -> tuple[int, str]:
        answer = ask(client, CHAT, ignore_eos=True, temperature=0, **body)
        return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]

    assert tokens(max_completion_tokens=5) == (5, "length")
    assert tokens(max_tokens=6) == (6, "length")
    assert tokens(max_completion_tokens=5, max_tokens=9) == (5, "length")
    assert tokens(max_completion_tokens=None, max_tokens=3) == (3, "length")
    num_prompt = ask(client, CHAT, max_tokens=1)["usage"]["prompt_tokens"]
    assert tokens() == (LIMIT - num_prompt, "length")
    assert ask(client, COMPLETIONS, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_b36_content_in_parts(client: httpx.Client) -> None:
    def answer(content: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return ask(client, CHAT, messages=messages, max_tokens=8, temperature=0)

    plain = answer("Morning")
    parts = answer([{"type": "text", "text": "Morn"}, {"type": "text", "text": "ing"}])
    assert parts["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert choice_text(parts["choices"][0]) == choice_text(plain["choices"][0])


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}],
        [],
        [{"type": "text"}],
        [{"text": "x"}],
        ["x"],
        {"type": "text", "text": "x"},
        [{"type": "text", "text": 5}],
    ],
)
def test_b36_parts_that_are_no_text(client: httpx.Client, content: Any) -> None:
    messages = [{"role": "user", "content": content}]
    refused(client.post(CHAT, json={"messages": messages}), "content")


def test_b37_prompts_that_are_too_long(client: httpx.Client) -> None:
    """While a stream runs, which goes on as if nothing had been asked."""
    body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    alone = choice_text(ask(client, COMPLETIONS, **body)["choices"][0])
    with client.stream(
        "POST", COMPLETIONS, json={**prepared(COMPLETIONS, body), "stream": True}
    ) as running:
        for length in (LIMIT, LIMIT + 1, 10 * LIMIT, 20_000_000):
            for prompt in ("x" * length, [5] * min(length, 10**6), ["ok", "x" * length]):
                response = client.post(COMPLETIONS, json={"prompt": prompt})
                error = refused(response, f"{LIMIT} tokens")
                assert error["code"] == "context_length_exceeded"
                numbers = [int(number) for number in re.findall(r"\d+", error["message"])]
                assert max(numbers) >= length // 20
        messages = [{"role": "user", "content": "x" * 3 * LIMIT}]
        refused(client.post(CHAT, json={"messages": messages}), str(LIMIT))
        lines = [line for line in running.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(choice_text(event["choices"][0]) for event in events) == alone
    assert ask(client, COMPLETIONS, prompt="x" * (LIMIT - 1))["usage"]["completion_tokens"] == 1


def test_b39_names_of_models(client: httpx.Client) -> None:
    for path in PATHS:
        for wrong in ("nope", ""):
            error = refused(client.post(path, json=prepared(path, {"model": wrong})), status=404)
            assert error["code"] == "model_not_found"
            assert "tiny" in error["message"]
        refused(client.post(path, json=prepared(path, {"model": 5})), "model")
        for right in ("tiny", None):
            assert ask(client, path, model=right, max_tokens=1)["model"] == "tiny"
        assert ask(client, path, max_tokens=1)["model"] == "tiny"
        stream = ask_streamed(client, path, max_tokens=1)
        assert {chunk["model"] for chunk in stream.chunks} == {"tiny"}
    listed = client.get("/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["tiny"]
    assert listed["data"][0]["max_model_len"] == LIMIT
    assert client.get("/v1/models/tiny").json() == listed["data"][0]
    refused(client.get("/v1/models/nope"), "tiny", status=404)

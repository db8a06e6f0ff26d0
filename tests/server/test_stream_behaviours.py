"""Streams over HTTP: usage, indices, ends and failures (B31, B32, B33, B40, B41)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.model import IM_END, POISON, make_model
from tests.server.process import ServerProcess
from tests.server.requests import (
    CHAT,
    COMPLETIONS,
    Stream,
    ask,
    ask_streamed,
    canary,
    choice_text,
    parse,
    prepared,
    refused,
)

PATHS = [COMPLETIONS, CHAT]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
def test_b31_usage_comes_last_if_asked_for(client: httpx.Client, path: str, n: int) -> None:
    body = {"max_tokens": 5, "temperature": 0, "n": n, "ignore_eos": True}
    wanted = ask_streamed(client, path, **body, stream_options={"include_usage": True})
    *others, last = wanted.chunks
    assert last["choices"] == []
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in others)
    usage = last["usage"]
    assert usage["completion_tokens"] == 5 * n
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    whole = ask(client, path, **body)["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole[name]


@pytest.mark.parametrize("options", [{"include_usage": False}, None, {}])
def test_b31_otherwise_there_is_no_usage(client: httpx.Client, options: Any) -> None:
    for path in PATHS:
        stream = ask_streamed(client, path, max_tokens=2, stream_options=options)
        assert stream.usage is None
        assert all(chunk["choices"] for chunk in stream.chunks)
    assert ask_streamed(client, CHAT, max_tokens=2).usage is None


def test_b31_without_a_stream_its_options_are_ignored(client: httpx.Client) -> None:
    for path in PATHS:
        body = {"stream": False, "stream_options": {"include_usage": True}}
        answer = ask(client, path, max_tokens=2, ignore_eos=True, **body)
        assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", PATHS)
def test_b32_samples_can_be_told_apart(client: httpx.Client, path: str) -> None:
    # A stop string ends the samples at different lengths.
    body = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 40, "stop": ["e", "l"]}
    whole = {choice["index"]: choice for choice in ask(client, path, **body)["choices"]}
    stream = ask_streamed(client, path, **body)
    assert whole.keys() == {0, 1, 2}
    for index, choice in whole.items():
        assert stream.text(index) == choice_text(choice)
        assert stream.finish_reason(index) == choice["finish_reason"]
        if path == CHAT:
            roles = [c["delta"].get("role") for c in stream.choices(index)]
            assert roles[0] == "assistant"
            assert not any(roles[1:])


def test_b32_prompts_of_one_request(client: httpx.Client) -> None:
    body = {"prompt": ["one", "two", "three"], "n": 2, "seed": 2, "max_tokens": 6}
    whole = ask(client, COMPLETIONS, **body)["choices"]
    assert [choice["index"] for choice in whole] == list(range(6))
    stream = ask_streamed(client, COMPLETIONS, **body)
    assert [stream.text(index) for index in range(6)] == [choice["text"] for choice in whole]
    alone = ask(client, COMPLETIONS, **{**body, "prompt": "two"})["choices"]
    assert [choice["text"] for choice in whole[2:4]] == [choice["text"] for choice in alone]


ENDS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 4, "ignore_eos": True}, "length"),
    ({"max_tokens": None, "ignore_eos": True}, "length"),
    ({"logit_bias": {str(IM_END): 100}}, "stop"),
    ({"logit_bias": {str(ord("q")): 100}, "stop": ["qq"]}, "stop"),
    ({"logit_bias": {str(ord("q")): 100}, "stop_token_ids": [ord("q")]}, "stop"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("body", "reason"), ENDS)
def test_b33_why_it_ended(
    client: httpx.Client, path: str, body: dict[str, Any], reason: str
) -> None:
    body = {"temperature": 0, "max_tokens": 20, **body}
    if body["max_tokens"] is None:  # the limit of the context
        body["max_tokens"] = 400
    (choice,) = ask(client, path, **body)["choices"]
    assert choice["finish_reason"] == reason
    stream = ask_streamed(client, path, **body)
    assert stream.finish_reason() == reason
    assert stream.text() == choice_text(choice)


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory, server_cache: Path):
    """A server whose model fails as soon as it has sampled a certain token."""
    model = make_model(tmp_path_factory.mktemp("models") / "fragile", poison=True)
    with ServerProcess(model, cache=server_cache) as process:
        yield process


def fail(index: int) -> dict[str, Any]:
    """A request whose answer fails once it has sampled a carriage return, which it soon does."""
    allowed = [ord("a") + index, POISON]
    return {"max_tokens": 200, "temperature": 1, "seed": index, "allowed_token_ids": allowed}


@pytest.mark.parametrize("path", PATHS)
def test_b40_failure_in_the_middle_of_a_stream(fragile: ServerProcess, path: str) -> None:
    healthy = {"max_tokens": 60, "temperature": 0, "allowed_token_ids": list(range(97, 123))}
    with fragile.client() as client, ThreadPoolExecutor(4) as pool:
        solo = ask_streamed(client, path, **healthy).text()
        bad = pool.submit(ask_streamed, client, path, **fail(0))
        good = [pool.submit(ask_streamed, client, path, **healthy) for _ in range(3)]
        failed = bad.result()
        (error,) = failed.errors
        assert "not finite" in error["message"]
        assert failed.num_done == 1
        assert all(choice["finish_reason"] is None for choice in failed.choices(0))
        for future in good:
            assert future.result().text() == solo
            assert future.result().errors == []
        response = client.post(path, json=prepared(path, fail(1)))
        assert refused(response, "not finite", status=500)["type"] == "server_error"
        assert client.get("/health").status_code == 200


def test_b40_one_failed_sample_ends_its_request(fragile: ServerProcess) -> None:
    with fragile.client() as client:
        stream = ask_streamed(client, COMPLETIONS, **fail(2), n=3)
        assert len(stream.errors) == 1
        assert stream.num_done == 1


def test_b41_equal_ids_are_served_independently(client: httpx.Client) -> None:
    prompts = ["alpha", "beta", "gamma", "alpha"]
    solo = [
        choice_text(ask(client, COMPLETIONS, prompt=p, max_tokens=20, temperature=0)["choices"][0])
        for p in prompts
    ]

    def one(prompt: str) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "request_id": "mine"}
        return client.post(COMPLETIONS, json=body, headers={"x-request-id": "mine"})

    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(one, prompts))
    assert [choice_text(r.json()["choices"][0]) for r in responses] == solo
    assert {r.headers["x-request-id"] for r in responses} == {"mine"}
    assert len({r.json()["id"] for r in responses}) == len(prompts)


def test_b41_ids_of_responses_are_unique(client: httpx.Client) -> None:
    with ThreadPoolExecutor(16) as pool:
        bodies = list(pool.map(lambda _: ask(client, COMPLETIONS, max_tokens=1), range(100)))
    assert len({body["id"] for body in bodies}) == 100


def test_a_slow_reader_loses_nothing(client: httpx.Client) -> None:
    body = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}
    whole = choice_text(ask(client, COMPLETIONS, **body)["choices"][0])
    asked = {**prepared(COMPLETIONS, body), "stream": True}
    with client.stream("POST", COMPLETIONS, json=asked) as response:
        lines = response.iter_lines()
        first = next(line for line in lines if line)
        before = canary(client)  # meanwhile others are served
        assert canary(client) == before
        stream: Stream = parse([first, *lines])
    assert stream.text() == whole


def test_streams_run_beside_each_other(client: httpx.Client) -> None:
    barrier = threading.Barrier(8)

    def one(index: int) -> str:
        barrier.wait()
        return ask_streamed(client, COMPLETIONS, prompt=f"stream {index}", temperature=0).text()

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(one, range(8)))
    alone = [
        ask_streamed(client, COMPLETIONS, prompt=f"stream {index}", temperature=0).text()
        for index in range(8)
    ]
    assert together == alone

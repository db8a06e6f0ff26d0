"""Requests that leave, wait or must be refused, and how a server ends: B42, B43, B46, B60."""

from __future__ import annotations

import contextlib
import itertools
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.model import CHATML, make_model
from tests.server.process import ServerProcess
from tests.server.requests import (
    CHAT,
    COMPLETIONS,
    ask,
    ask_streamed,
    canary,
    choice_text,
    parse,
    prepared,
    refused,
)

NUM = 300
LONG = {"n": NUM, "max_tokens": 240, "ignore_eos": True}
"""A request that keeps all slots busy for thousands of steps, and its queue full."""
PATIENCE_S = 30


def gauge(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^jaxserve:{name}(?:{{.*}})? (\S+)$", client.get("/metrics").text, re.M)
    assert found, name
    return float(found[1])


def until(condition: Any) -> None:
    """Wait for something that must happen soon, and in any case."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


@contextlib.contextmanager
def open_stream(client: httpx.Client, **body: Any) -> Iterator[Iterator[str]]:
    """A stream whose first event has come; leaving closes the connection."""
    asked = {**prepared(COMPLETIONS, body), "stream": True}
    with client.stream("POST", COMPLETIONS, json=asked) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        first = next(lines)
        yield itertools.chain([first], lines)


def total(client: httpx.Client) -> float:
    return gauge(client, "generation_tokens_total")


def used_pages(client: httpx.Client) -> int:
    return int(client.get("/server_status").json()["pages"]["used"])


def test_b42_a_disconnect_frees_slots_and_pages(server: ServerProcess) -> None:
    with server.client() as client:
        before = canary(client)
        num_before = total(client)
        for _ in range(5):
            with server.client() as lone, open_stream(lone, **LONG):
                until(lambda: gauge(client, "num_requests_running") == 8)
                # The second waits in the queue; nobody has begun to read its answer.
                with pytest.raises(httpx.ReadTimeout):
                    lone.post(COMPLETIONS, json=prepared(COMPLETIONS, LONG), timeout=0.05)
            assert canary(client) == before
            until(lambda: gauge(client, "num_requests_running") == 0)
            assert gauge(client, "num_requests_waiting") == 0
            until(lambda: used_pages(client) == 0)
        # They ended because they were left, not because they were through.
        assert total(client) - num_before < 5 * NUM * 240 / 4


def test_abort_by_either_name(server: ServerProcess) -> None:
    with server.client() as client, ThreadPoolExecutor(1) as pool:
        headers = {"x-request-id": "my-own-name"}
        body = prepared(COMPLETIONS, LONG)
        whole = pool.submit(client.post, COMPLETIONS, json=body, headers=headers)
        until(lambda: abort(client, "my-own-name") == 1)
        choices = whole.result().json()["choices"]
        assert len(choices) == NUM
        assert choices[-1]["finish_reason"] == "abort"
        with open_stream(client, **LONG) as lines:
            first = next(lines)
            (name,) = re.findall(r'"id":"(cmpl-\w+)"', first)
            assert abort(client, name) == 1
            stream = parse([first, *lines])
        assert stream.finish_reason(NUM - 1) == "abort"
        assert stream.num_done == 1
        until(lambda: abort(client, name) == 0)


def abort(client: httpx.Client, name: str) -> int:
    return int(client.post("/abort_request", json={"request_id": name}).json()["aborted"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_deadline_keeps_what_there_is(client: httpx.Client, path: str) -> None:
    answer = ask(client, path, **LONG, timeout=0.4)
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    assert answer["choices"][-1]["stop_reason"] == "deadline"
    assert 0 < answer["usage"]["completion_tokens"] < NUM * 200
    stream = ask_streamed(client, path, **LONG, timeout=0.4)
    assert stream.finish_reason(NUM - 1) == "length"
    assert stream.choices(NUM - 1)[-1]["stop_reason"] == "deadline"
    assert stream.text(0)
    for wrong in (-1, "soon", 0):
        refused(client.post(path, json=prepared(path, {"timeout": wrong})), "timeout")


def test_b43_a_request_that_can_never_fit_blocks_nobody(
    model_directory: Path, server_cache: Path
) -> None:
    """The cache holds 160 tokens, so that this is the longest sequence."""
    flags = ("--max-model-len", 240, "--num-kv-blocks", 21)
    with ServerProcess(model_directory, *flags, cache=server_cache) as process:
        assert "max_model_len lowered from 240 to 161" in process.log
        with process.client() as client, ThreadPoolExecutor(8) as pool:
            small = [pool.submit(canary, client) for _ in range(3)]
            refused(client.post(COMPLETIONS, json={"prompt": "x" * 200}), "161")
            body = {"prompt": "x" * 100, "max_tokens": 200, "ignore_eos": True}
            big = pool.submit(ask, client, COMPLETIONS, **body)
            small += [pool.submit(canary, client) for _ in range(3)]
            assert len({future.result() for future in small}) == 1
            (choice,) = big.result()["choices"]
            assert choice["finish_reason"] == "length"
            assert big.result()["usage"]["total_tokens"] == 161


@pytest.fixture(scope="module")
def short_queue(model_directory: Path, server_cache: Path):
    """A server in which two samples may wait, with other limits to run into."""
    flags = ("--max-queue", 2, "--max-body-mib", 0.01, "--root-path", "/behind/a/proxy")
    named = ("--served-model-name", "one", "--served-model-name", "two", "--api-key", "secret")
    with ServerProcess(model_directory, *flags, *named, cache=server_cache) as process:
        yield process


KEY = {"authorization": "Bearer secret"}


def test_a_full_queue_is_429_with_retry_after(short_queue: ServerProcess) -> None:
    with short_queue.client(headers=KEY) as client, ThreadPoolExecutor(48) as pool:
        alone = canary(client)
        body = {**prepared(COMPLETIONS, {}), "max_tokens": 240, "ignore_eos": True}
        responses = list(pool.map(lambda _: client.post(COMPLETIONS, json=body), range(48)))
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 429}
        for response in responses:
            if response.status_code == 429:
                error = refused(response, "max_queue is 2", status=429)
                assert error["code"] == "queue_full"
                assert int(response.headers["retry-after"]) >= 1
        refused(client.post(COMPLETIONS, json={"prompt": "x", "n": 3}), "3 samples", "at most 2")
        assert canary(client) == alone


def test_bodies_over_the_limit_are_413(short_queue: ServerProcess) -> None:
    with short_queue.client(headers=KEY) as client:
        large = b'{"prompt": "' + b"x" * 20_000 + b'"}'
        json_type = {"content-type": "application/json"}
        for content in (large, iter([large[:9000], large[9000:]])):
            response = client.post(COMPLETIONS, content=content, headers=json_type)
            error = refused(response, "0.01 MiB", "--max-body-mib", status=413)
            assert error["code"] == "body_too_large"
        assert canary(client)


def test_an_api_key_is_needed_where_one_is_set(short_queue: ServerProcess) -> None:
    with short_queue.client() as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
            error = refused(response, "API key", status=401)
            assert error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            for path in ("/v1/models", "/server_info", "/tokenizer_info"):
                refused(client.get(path, headers=headers), status=401)
            refused(client.post("/abort_request", json={}, headers=headers), status=401)
        for path in ("/health", "/ready", "/version", "/metrics", "/server_status"):
            assert client.get(path).status_code == 200
        assert client.get("/v1/models", headers={"authorization": "bearer secret"}).is_success
        assert 'handler="/health"' in client.get("/metrics").text
        assert client.get("/openapi.json").json()["servers"] == [{"url": "/behind/a/proxy"}]
        assert "secret" not in client.get("/server_info", headers=KEY).text


def test_several_names_of_a_model(short_queue: ServerProcess) -> None:
    with short_queue.client(headers=KEY) as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["one", "two"]
        assert ask(client, COMPLETIONS, model="two", max_tokens=1)["model"] == "two"
        assert ask(client, COMPLETIONS, max_tokens=1)["model"] == "one"
        refused(client.post(COMPLETIONS, json={"prompt": "x", "model": "tiny"}), status=404)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_b46_an_idle_server_ends_at_once(
    model_directory: Path, server_cache: Path, signum: signal.Signals
) -> None:
    with ServerProcess(model_directory, cache=server_cache) as process:
        with process.client() as idle:
            assert idle.get("/health").status_code == 200
            process.send(signum)
            assert process.wait() == 0
        assert "Traceback" not in process.log


def test_b46_running_requests_end_and_new_ones_are_refused(
    model_directory: Path, server_cache: Path
) -> None:
    with ServerProcess(model_directory, cache=server_cache) as process:
        with process.client() as client, contextlib.ExitStack() as stack:
            body = {"max_tokens": 230, "temperature": 0, "ignore_eos": True}
            alone = choice_text(ask(client, COMPLETIONS, **body)["choices"][0])
            streams = [stack.enter_context(open_stream(client, **body)) for _ in range(3)]
            process.send(signal.SIGTERM)
            with contextlib.suppress(httpx.TransportError):  # the answers may be through already
                while client.get("/ready").status_code == 200:
                    pass
                refused(client.get("/ready"), "shutting down", status=503)
                response = client.post(COMPLETIONS, json={"prompt": "x"})
                refused(response, "shutting down", status=503)
                assert int(response.headers["retry-after"]) >= 1
                assert client.get("/health").status_code == 200
            for lines in streams:
                stream = parse(lines)
                assert stream.text() == alone
                assert stream.finish_reason() == "length"
                assert stream.errors == []
        assert process.wait() == 0


@pytest.mark.parametrize("how", ["twice", "grace time"])
def test_b46_requests_that_take_too_long_are_cut_with_an_error(
    how: str, model_directory: Path, server_cache: Path
) -> None:
    grace = 0.2 if how == "grace time" else 600
    flags = ("--drain-timeout-s", grace)
    with ServerProcess(model_directory, *flags, cache=server_cache) as process:
        with process.client() as client, open_stream(client, **LONG) as lines:
            process.send(signal.SIGTERM)
            if how == "twice":
                until(lambda: client.get("/ready").status_code == 503)
                process.send(signal.SIGTERM)
            stream = parse(lines)
        (error,) = stream.errors
        assert "shutting down" in error["message"]
        assert stream.num_done == 1
        assert process.wait() == 1
        assert "Traceback" not in process.log


def test_b60_a_model_without_a_template(tmp_path: Path, server_cache: Path) -> None:
    model = make_model(tmp_path / "base", template=None)
    template = tmp_path / "template.jinja"
    template.write_text(CHATML)
    with ServerProcess(model, cache=server_cache) as process, process.client() as client:
        text = canary(client)
        refused(client.post(CHAT, json=prepared(CHAT, {})), "chat template", "--chat-template")
        refused(
            client.post(CHAT, json=prepared(CHAT, {"stream": True})), "chat template", status=400
        )
        assert client.get("/ready").status_code == 200
    flags = ("--chat-template", template)
    with ServerProcess(model, *flags, cache=server_cache) as process, process.client() as client:
        assert canary(client) == text
        answer = ask(client, CHAT, max_tokens=3, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 3

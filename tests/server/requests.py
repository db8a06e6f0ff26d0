"""Requests to a server and what its answers say."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
CANARY = {"prompt": "The canary sings", "max_tokens": 12, "temperature": 0}
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Stream:
    """The events of a streamed answer, in order."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0
    usage: dict[str, Any] | None = None

    def choices(self, index: int) -> list[dict[str, Any]]:
        """What was sent for one sample."""
        return [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == index]

    def text(self, index: int = 0) -> str:
        """The whole text of a sample, of either endpoint."""
        return "".join(choice_text(choice) for choice in self.choices(index))

    def finish_reason(self, index: int = 0) -> str | None:
        """The one finish reason of a sample, in its last chunk."""
        *before, last = self.choices(index)
        assert all(choice["finish_reason"] is None for choice in before)
        reason = last["finish_reason"]
        assert reason is None or isinstance(reason, str)
        return reason


def choice_text(choice: dict[str, Any]) -> str:
    """The text of a choice of any kind of body or chunk."""
    if "text" in choice:
        return str(choice["text"])
    return choice.get("message", choice.get("delta", {})).get("content") or ""


def parse(lines: Any) -> Stream:
    """Read events strictly: data lines between blank ones, and nothing after [DONE]."""
    stream = Stream()
    for line in lines:
        if not line:
            continue
        assert line.startswith("data: "), line
        assert stream.num_done == 0, f"after [DONE]: {line}"
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            stream.num_done += 1
            continue
        event = json.loads(data)
        if "error" in event:
            stream.errors.append(event["error"])
            continue
        assert not stream.errors, f"after an error: {line}"
        stream.chunks.append(event)
        stream.usage = event.get("usage") or stream.usage
    return stream


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The body of a whole answer."""
    response = client.post(path, json=prepared(path, body))
    assert response.status_code == 200, response.text
    result = response.json()
    assert isinstance(result, dict)
    return result


def ask_streamed(client: httpx.Client, path: str, **body: Any) -> Stream:
    """The events of a streamed answer."""
    with client.stream("POST", path, json={**prepared(path, body), "stream": True}) as response:
        if response.status_code != 200:
            response.read()
        assert response.status_code == 200, response.text
        stream = parse(response.iter_lines())
    assert stream.num_done == 1
    return stream


def prepared(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body with a prompt of the endpoint's kind, unless it has one."""
    if path == CHAT:
        return {"messages": HELLO, **body}
    return {"prompt": "hello", **body}


def refused(response: httpx.Response, *words: str, status: int = 400) -> dict[str, Any]:
    """Check that a response is an error in OpenAI's form that has the words; the error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.text, parse_constant=_no_constant)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    for word in words:
        assert word in error["message"], error
    assert isinstance(error, dict)
    return error


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def canary(client: httpx.Client) -> str:
    """The text of the canary, which must be the same at any time."""
    return choice_text(ask(client, COMPLETIONS, **CANARY)["choices"][0])

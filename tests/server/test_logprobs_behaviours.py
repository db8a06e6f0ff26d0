"""Log-probabilities over HTTP: their layout (B20) and those of an echoed prompt (B38)."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.server.requests import CHAT, COMPLETIONS, ask, ask_streamed, prepared, refused

# Hot enough that the sampled token is often not among the top three.
HOT = {
    "temperature": 1.5,
    "seed": 11,
    "max_tokens": 9,
    "allowed_token_ids": list(range(32, 127)),
}


@pytest.mark.parametrize(("top", "length"), [(None, 0), (0, 0), (3, 3)])
def test_b20_chat(client: httpx.Client, top: int | None, length: int) -> None:
    wanted = {"logprobs": True} | ({} if top is None else {"top_logprobs": top})
    answer = ask(client, CHAT, **HOT, **wanted)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == 9
    text = b""
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == length
        best = [candidate["logprob"] for candidate in entry["top_logprobs"]]
        assert best == sorted(best, reverse=True)
        assert sum(map(math.exp, best)) <= 1 + 1e-5
        assert entry["logprob"] <= 0
        text += bytes(entry["bytes"])
    assert text.decode() == choice["message"]["content"]
    stream = ask_streamed(client, CHAT, **HOT, **wanted)
    pieces = [c["logprobs"]["content"] for c in stream.choices(0) if c.get("logprobs")]
    assert [entry for piece in pieces for entry in piece] == content


@pytest.mark.parametrize("top", [0, 3])
def test_b20_completions(client: httpx.Client, top: int) -> None:
    answer = ask(client, COMPLETIONS, **HOT, logprobs=top)
    (choice,) = answer["choices"]
    check_lists(choice, top, choice["text"])
    assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == 9
    stream = ask_streamed(client, COMPLETIONS, **HOT, logprobs=top)
    whole: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    for part in stream.choices(0):
        for name, values in (part.get("logprobs") or {}).items():
            whole[name] += values
    assert whole == choice["logprobs"]


def check_lists(choice: dict[str, Any], top: int, text: str) -> None:
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len({len(values) for values in logprobs.values()}) == 1
    assert "".join(logprobs["tokens"]) == text
    offset = 0
    for token, logprob, candidates, start in zip(
        logprobs["tokens"],
        logprobs["token_logprobs"],
        logprobs["top_logprobs"],
        logprobs["text_offset"],
        strict=True,
    ):
        assert start == offset
        offset += len(token)
        if logprob is None:
            continue
        assert candidates[token] == logprob
        assert top <= len(candidates) <= top + 1
        assert sum(map(math.exp, candidates.values())) <= 1 + 1e-5


def test_b20_without_being_asked_there_are_none(client: httpx.Client) -> None:
    for path in (CHAT, COMPLETIONS):
        assert ask(client, path, max_tokens=2)["choices"][0]["logprobs"] is None


def test_b38_echo_scores_the_prompt(client: httpx.Client) -> None:
    prompt = "To be, or not to be"
    scored = ask(client, COMPLETIONS, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    (choice,) = scored["choices"]
    assert choice["text"] == prompt
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["usage"]["prompt_tokens"] == len(choice["logprobs"]["tokens"]) == len(prompt)
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert all(math.isfinite(value) for value in others)
    check_lists(choice, 1, prompt)
    # The model gives a token the same log-probability whether it reads or samples it.
    for length in (4, 11):
        bias = {str(ord(prompt[length])): 100}
        sampled = ask(
            client,
            COMPLETIONS,
            prompt=prompt[:length],
            max_tokens=1,
            temperature=0,
            logit_bias=bias,
            logprobs=0,
        )
        (value,) = sampled["choices"][0]["logprobs"]["token_logprobs"]
        assert value == pytest.approx(choice["logprobs"]["token_logprobs"][length], abs=1e-4)


def test_b38_echo_before_an_answer(client: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "once", "echo": True, "max_tokens": 3, "temperature": 0}
    plain = ask(client, COMPLETIONS, prompt="once", max_tokens=3, temperature=0)
    for wanted in ({}, {"logprobs": 2}):
        answer = ask(client, COMPLETIONS, **body, **wanted)
        assert answer["choices"][0]["text"] == "once" + plain["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == 3
        stream = ask_streamed(client, COMPLETIONS, **body, **wanted)
        assert stream.text() == answer["choices"][0]["text"]
    check_lists(answer["choices"][0], 2, answer["choices"][0]["text"])


def test_b38_limits_of_max_tokens(client: httpx.Client) -> None:
    for path in (COMPLETIONS, CHAT):
        for value in (-1, 1.5, 0):
            refused(client.post(path, json=prepared(path, {"max_tokens": value})), "max_tokens")
    answer = ask(client, COMPLETIONS, max_tokens=10**9, ignore_eos=True)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256

"""Requests for the soak and what must come back: cases, bad requests, and one HTTP exchange.

Knows the wire format.  Does not know when which request is sent (`soak.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "A good recipe for tomato soup begins with",
    "In 1969, the first people to walk on the Moon",
    "Zażółć gęślą jaźń; 東京は日本の首都です。 Smileys \N{GRINNING FACE} are",
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "chess", "rain"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """A request whose answer is the same whatever else runs."""

    path: str
    body: Mapping[str, Any]
    schema: Mapping[str, Any] | None = None
    """What the text of a finished answer validates, if it is JSON."""


@dataclass(frozen=True)
class Bad:
    """A request that must be refused."""

    path: str
    content: bytes


@dataclass
class Choice:
    """One choice as it arrives."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Answer:
    """What a server sent for one case."""

    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int | None = None

    def __str__(self) -> str:
        texts = [repr(self.choices[index].text[-60:]) for index in sorted(self.choices)]
        return f"{self.completion_tokens} tokens, ends {', '.join(texts)}"


class WrongAnswerError(Exception):
    """An exchange that breaks what the server promises."""


def cases(seed: int) -> list[Case]:
    """Plain and structured requests, greedy and seeded, with all that changes an answer's form."""
    rng = random.Random(seed)
    found = [_plain(rng, number) for number in range(24)]
    for number, text in enumerate(PROMPTS):
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": 24, "seed": number, "temperature": 0.8}
        found.append(Case(CHAT, {**body, "logprobs": True, "top_logprobs": number % 3}))
    return found + _structured()


def _plain(rng: random.Random, number: int) -> Case:
    prompt: Any = PROMPTS[number % len(PROMPTS)] * rng.choice((1, 1, 2, 8))
    if number % 4 == 3:
        prompt = [rng.randrange(100, 250) for _ in range(rng.choice((1, 17, 64, 130)))]
    body = {
        "prompt": prompt,
        "max_tokens": rng.choice((1, 7, 16, 40)),
        "temperature": rng.choice((0, 0.9)),
        "seed": number,
        "n": rng.choice((1, 1, 1, 3)),
        "ignore_eos": rng.random() < 0.5,
        "logprobs": rng.choice((None, 0, 2)),
        "stop": rng.choice((None, None, [" the", "\n\n"])),
        "presence_penalty": rng.choice((0, 0.5)),
    }
    return Case(COMPLETIONS, body)


def _structured() -> list[Case]:
    def ask(number: int, path: str, **fields: Any) -> dict[str, Any]:
        text = "Describe a person as JSON."
        prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {}
        common = {"seed": number, "temperature": 0.7, "max_tokens": 64}
        return {**common, **(prompt or {"prompt": text}), **fields}

    named = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    words = {"type": "object"}
    return [
        *(Case(CHAT, ask(n, CHAT, response_format=named), PERSON) for n in range(4)),
        Case(COMPLETIONS, ask(5, COMPLETIONS, structured_outputs={"json": PERSON}), PERSON),
        Case(COMPLETIONS, ask(6, COMPLETIONS, structured_outputs={"regex": "[a-f]{8}-[0-9]{4}"})),
        Case(COMPLETIONS, ask(7, COMPLETIONS, structured_outputs={"choice": ["red", "blue"]})),
        Case(CHAT, ask(8, CHAT, response_format={"type": "json_object"}), words),
    ]


def bad_requests(max_model_len: int) -> list[Bad]:
    """One of each kind of mistake."""
    turn = [{"role": "user", "content": "hi"}]
    bodies: list[tuple[str, Any]] = [
        (COMPLETIONS, {"prompt": "hi", "max_tokens": -1}),
        (COMPLETIONS, {"prompt": "hi", "temperature": "hot"}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [10**9]}),
        (COMPLETIONS, {"prompt": [5] * (max_model_len + 1)}),
        (COMPLETIONS, {"prompt": "hi", "model": "nope"}),
        (COMPLETIONS, {"prompt": "hi", "structured_outputs": {"regex": "(unclosed"}}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": turn, "n": 0}),
        (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}),
        (CHAT, {"messages": turn, "top_logprobs": 3}),
        (CHAT, {"messages": turn, "response_format": {"type": "json_schema"}}),
        (CHAT, None),
    ]
    found = [Bad(path, json.dumps(body).encode()) for path, body in bodies]
    return [*found, Bad(COMPLETIONS, b'{"prompt": "hi"'), Bad(CHAT, b"\xff\xfe")]


async def send_bad(client: httpx.AsyncClient, bad: Bad) -> None:
    """Send a bad request.

    Raises:
        WrongAnswerError: it was not refused with an error in OpenAI's form.
    """
    headers = {"content-type": "application/json"}
    answer = await client.post(bad.path, content=bad.content, headers=headers)
    message = None
    if 400 <= answer.status_code < 500:
        message = answer.json().get("error", {}).get("message")
    if not message:
        raise WrongAnswerError(
            f"{bad.content[:80]!r}: status {answer.status_code}, {answer.text[:200]!r}"
        )


async def send_whole(client: httpx.AsyncClient, case: Case) -> Answer:
    """Send a case that is not streamed.

    Raises:
        WrongAnswerError: the status is not 200.
    """
    response = await client.post(case.path, json=case.body)
    if response.status_code != 200:
        raise WrongAnswerError(f"status {response.status_code}: {response.text[:300]}")
    answer = Answer()
    _add(answer, response.json())
    return answer


async def send_streamed(
    client: httpx.AsyncClient, case: Case, *, chunks: int | None = None, pause_s: float = 0.0
) -> Answer:
    """Send a case that is streamed.

    Args:
        client: an open client.
        case: what to ask.
        chunks: leave after so many, without a word.
        pause_s: a slow reader's rest after each chunk.

    Raises:
        WrongAnswerError: the status is not 200, or the stream's form is wrong.
    """
    body = {**case.body, "stream": True, "stream_options": {"include_usage": True}}
    answer, count = Answer(), 0
    async with client.stream("POST", case.path, json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise WrongAnswerError(f"status {response.status_code}: {text[:300]}")
        async for event in _events(response):
            if count == chunks:
                return answer
            _add(answer, event)
            count += 1
            await asyncio.sleep(pause_s)
    return answer


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    """The JSON of each event; the stream must end with [DONE] and nothing after it."""
    is_done = False
    async for line in response.aiter_lines():
        if not line:
            continue
        if is_done or not line.startswith("data: "):
            raise WrongAnswerError(f"unexpected line in a stream: {line[:200]!r}")
        if line == "data: [DONE]":
            is_done = True
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise WrongAnswerError(f"error in a stream: {event}")
        yield event
    if not is_done:
        raise WrongAnswerError("a stream ended without [DONE]")


def _add(answer: Answer, body: Mapping[str, Any]) -> None:
    """Append a chunk, or a whole body, to what is there."""
    for part in body["choices"]:
        choice = answer.choices.setdefault(part["index"], Choice())
        if choice.finish_reason is not None:
            raise WrongAnswerError(f"choice {part['index']} goes on after its end: {part}")
        message = part.get("delta") or part.get("message") or part
        choice.text += message.get("content") or message.get("text") or ""
        choice.finish_reason = part.get("finish_reason")
        choice.tokens += _tokens(part.get("logprobs") or {})
    usage = body.get("usage")
    if usage:
        answer.completion_tokens = usage["completion_tokens"]


def _tokens(logprobs: Mapping[str, Any]) -> list[str]:
    if "content" in logprobs:
        return [entry["token"] for entry in logprobs["content"] or ()]
    return list(logprobs.get("tokens") or ())


def check_whole(case: Case, answer: Answer, alone: Answer) -> None:
    """Compare a complete answer with the one that the case had alone.

    Raises:
        WrongAnswerError: anything differs.
    """
    if answer != alone:
        raise WrongAnswerError(f"got {answer}; alone it was {alone}; asked {case.body}")


def check_part(case: Case, answer: Answer, alone: Answer) -> None:
    """Compare what an aborted request had received.

    Raises:
        WrongAnswerError: it is not the beginning of the answer that the case had alone.
    """
    for index, choice in answer.choices.items():
        whole = alone.choices[index]
        same = whole.tokens[: len(choice.tokens)] == choice.tokens
        if not whole.text.startswith(choice.text) or not same:
            raise WrongAnswerError(f"got {choice}; alone it was {whole}; asked {case.body}")


def check_alone(case: Case, answer: Answer) -> None:
    """Check what can be said of a case's answer in itself.

    Raises:
        WrongAnswerError: a choice is missing or unfinished, or is not what its schema wants.
    """
    if set(answer.choices) != set(range(case.body.get("n") or 1)):
        raise WrongAnswerError(f"choices {sorted(answer.choices)} for {case.body}")
    for choice in answer.choices.values():
        if choice.finish_reason not in ("stop", "length"):
            raise WrongAnswerError(f"finish reason {choice.finish_reason!r} for {case.body}")
        if case.schema is not None and choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.text), case.schema)

"""Requests, outputs and streams for tests of the protocol, without an engine."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from jaxserve.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput
from jaxserve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Prompt,
    convert_body,
    response_body,
    streamed_answer,
)
from tests.cli.fakes import FakeTokenizer

TOKENIZER = FakeTokenizer()
USER = [{"role": "user", "content": "hi"}]
HI = Prompt([104, 105], "hi")
HEAD = {"response_id": "7", "model": "m", "created": 3}


def completion(**body) -> CompletionRequest:
    return convert_body({"prompt": "x", **body}, CompletionRequest)


def chat(**body) -> ChatCompletionRequest:
    return convert_body({"messages": USER, **body}, ChatCompletionRequest)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("weather", city={"type": "string"})
CLOCK = tool("clock", hours={"type": "integer"}, zone={"enum": ["utc", "local"]})


def position(token: int, *others: int) -> dict[int, Logprob]:
    """Candidates of a position: the sampled token first, then the others by rank."""
    entries = {token: Logprob(-0.5, 1, chr(token))}
    for rank, other in enumerate(others, start=2):
        entries.setdefault(other, Logprob(-float(rank), rank, chr(other)))
    return entries


def output(
    *texts: str, prompt: Prompt = HI, reason: str = "stop", logprobs: bool = False
) -> RequestOutput:
    """A finished output with a sample for each text, a token for each byte."""
    samples = []
    for index, text in enumerate(texts):
        ids = list(text.encode())
        positions = [position(token, 97) for token in ids] if logprobs else None
        samples.append(CompletionOutput(index, text, ids, None, positions, reason))
    scores = [None, *(position(token) for token in prompt.token_ids[1:])]
    metrics = RequestMetrics(0.0, num_cached_tokens=1)
    return RequestOutput("r", None, list(prompt.token_ids), scores, samples, True, metrics)


def deltas(result: RequestOutput, seed: int = 0) -> list[Delta]:
    """The news of which an output consists, in pieces of random lengths and order."""
    chance = random.Random(seed)
    queues = [_pieces(sample, chance) for sample in result.outputs]
    merged = []
    while any(queues):
        merged.append(chance.choice([queue for queue in queues if queue]).pop(0))
    return merged


def _pieces(sample: CompletionOutput, chance: random.Random) -> list[Delta]:
    pieces: list[Delta] = []
    done = 0
    while done < len(sample.text):
        end = min(len(sample.text), done + chance.randint(1, 5))
        text = sample.text[done:end]
        first = len(sample.text[:done].encode())
        last = first + len(text.encode())
        scores = None if sample.logprobs is None else tuple(sample.logprobs[first:last])
        ids = tuple(sample.token_ids[first:last])
        pieces.append(Delta("r", sample.index, text, ids, None, None, scores))
        done = end
    none = None if sample.logprobs is None else ()
    return [*pieces, Delta("r", sample.index, "", (), sample.finish_reason, None, none)]


def whole(request, *outputs: RequestOutput, prompts=(HI,), answer_format=None) -> dict[str, Any]:
    """The answer in one piece, as JSON."""
    body = response_body(
        request, list(prompts), list(outputs), TOKENIZER, answer_format=answer_format, **HEAD
    )
    return msgspec.json.decode(msgspec.json.encode(body))


def streamed(
    request, *outputs: RequestOutput, prompts=(HI,), answer_format=None, seed: int = 0
) -> list[dict[str, Any]]:
    """The chunks of the answer, as JSON."""
    answer = streamed_answer(request, list(prompts), TOKENIZER, answer_format=answer_format, **HEAD)
    chunks = answer.start()
    for index, result in enumerate(outputs):
        for delta in deltas(result, seed):
            chunks += answer.push(index, delta, result.prompt_logprobs)
    chunks += answer.end(list(outputs))
    return [msgspec.json.decode(msgspec.json.encode(chunk)) for chunk in chunks]


def joined_chat(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client makes of the chunks of a chat: a choice for each index."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], {"message": {}, "finish_reason": None})
            assert choice["finish_reason"] is None, "a piece after the finish reason"
            choice["finish_reason"] = piece["finish_reason"]
            message, delta = choice["message"], dict(piece["delta"])
            assert ("role" in delta) == (not message), "the role comes first, and once"
            for call in delta.pop("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                assert call.pop("index") == len(calls)
                calls.append(call)
            for name, text in delta.items():
                message[name] = message.get(name, "") + text
            if piece["logprobs"]:
                choice.setdefault("logprobs", []).extend(piece["logprobs"]["content"])
    return choices

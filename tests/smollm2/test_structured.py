"""Constraints on the demo model: valid JSON from it, and not a bit of difference for neighbours."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.outputs import RequestOutput

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog", "bird"]}, "maxItems": 3},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
TOPICS = ["the sea", "bread", "a small town", "winter", "trains", "music", "maps", "rain"]


def ask(model: LLM, messages: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    return model.chat([[{"role": "user", "content": m}] for m in messages], params)


def test_json_and_neighbours(bf16: LLM) -> None:
    people = [f"Describe person number {i} as JSON with name, age and pets." for i in range(8)]
    texts = [f"Write two sentences about {topic}." for topic in TOPICS]
    json_params = SamplingParams(temperature=0, max_tokens=96, structured_outputs={"json": SCHEMA})
    plain: list[SamplingParams] = [
        SamplingParams(temperature=0, max_tokens=40, logprobs=2),
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=40, logprobs=0),
        SamplingParams(temperature=0.7, seed=5, max_tokens=40),
    ] * 2
    alone = ask(bf16, texts, plain)
    together = ask(bf16, people + texts, [json_params] * 8 + plain)
    for output in together[:8]:
        sample = output.outputs[0]
        assert sample.finish_reason == "stop"
        jsonschema.validate(json.loads(sample.text), SCHEMA)
    for with_json, without in zip(together[8:], alone, strict=True):
        assert with_json.outputs[0].token_ids == without.outputs[0].token_ids
        assert with_json.outputs[0].logprobs == without.outputs[0].logprobs
    assert bf16.engine.compilations.count == 0


@pytest.mark.parametrize(
    ("constraint", "want"),
    [
        ({"choice": ["blue", "green"]}, "blue"),
        ({"regex": r"(\d{3,4})"}, None),
        # The letters of a special token are letters.
        ({"choice": ["<|im_start|>a"]}, "<|im_start|>a"),
    ],
)
def test_short_answers(bf16: LLM, constraint: dict[str, Any], want: str | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, structured_outputs=constraint)
    text = bf16.generate("The colour of a clear sky at noon is", params)[0].outputs[0].text
    assert text == want if want is not None else text.isdigit()


def test_what_is_too_complex_is_refused_at_once(bf16: LLM) -> None:
    params = SamplingParams(structured_outputs={"regex": "a{1000000}"})
    with pytest.raises(ValueError, match=r"regex cannot be followed: .*too many") as caught:
        bf16.generate("x", params)
    assert len(str(caught.value)) < 700
    assert not bf16.engine.has_work

"""Streamed answers: the chunks add up to the answer in one piece."""

import pytest

from jaxserve.outputs import Delta
from jaxserve.protocol import Prompt, streamed_answer
from tests.protocol.answers import (
    HEAD,
    HI,
    TOKENIZER,
    chat,
    completion,
    joined_chat,
    output,
    streamed,
    whole,
)

SEEDS = range(5)
USAGE = {"stream_options": {"include_usage": True}}


class TestChat:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_chunks_add_up_to_the_whole_answer(self, seed):
        request = chat(n=3)
        result = output("first", "the second", "3", reason="length")
        choices = joined_chat(streamed(request, result, seed=seed))
        for choice in whole(request, result)["choices"]:
            found = choices.pop(choice["index"])
            assert found["message"]["content"] == choice["message"]["content"]
            assert found["message"]["role"] == "assistant"
            assert found["finish_reason"] == choice["finish_reason"] == "length"
        assert not choices

    def test_every_chunk_repeats_the_head(self):
        for chunk in streamed(chat(), output("abc")):
            assert chunk["object"] == "chat.completion.chunk"
            assert (chunk["id"], chunk["model"], chunk["created"]) == ("chatcmpl-7", "m", 3)

    @pytest.mark.parametrize("num_top", [0, 1])
    def test_logprobs_are_those_of_the_whole_answer(self, num_top):
        request = chat(logprobs=True, top_logprobs=num_top)
        result = output("some text", logprobs=True)
        (choice,) = whole(request, result)["choices"]
        found = joined_chat(streamed(request, result))[0]
        assert found["logprobs"] == choice["logprobs"]["content"]
        assert len(found["logprobs"]) == 9

    def test_tokens_without_certain_text_still_bring_their_logprobs(self):
        answer = streamed_answer(chat(logprobs=True), [HI], TOKENIZER, **HEAD)
        scores = tuple(output("a", logprobs=True).outputs[0].logprobs)
        (chunk,) = answer.push(0, Delta("r", 0, "", (97,), None, None, scores))
        assert [entry.token for entry in chunk.choices[0].logprobs.content] == ["a"]

    def test_tokens_without_certain_text_give_no_chunk(self):
        answer = streamed_answer(chat(), [HI], TOKENIZER, **HEAD)
        assert answer.push(0, Delta("r", 0, "", (97,), None)) == []

    def test_the_end_is_a_chunk_even_without_text(self):
        answer = streamed_answer(chat(), [HI], TOKENIZER, **HEAD)
        (chunk,) = answer.push(0, Delta("r", 0, "", (2,), "stop", "END"))
        assert (chunk.choices[0].finish_reason, chunk.choices[0].stop_reason) == ("stop", "END")


class TestCompletion:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_chunks_add_up_to_the_whole_answer(self, seed):
        request = completion(prompt=["hi", "yo"], n=2, logprobs=1)
        prompts = [HI, Prompt([121, 111], "yo")]
        results = [output("first", "2nd", logprobs=True), output("third", "", logprobs=True)]
        chunks = streamed(request, *results, prompts=prompts, seed=seed)
        expected = whole(request, *results, prompts=prompts)["choices"]
        assert joined_completion(chunks) == {choice["index"]: choice for choice in expected}

    @pytest.mark.parametrize("seed", SEEDS)
    def test_an_echoed_prompt_comes_first_for_every_sample(self, seed):
        request = completion(prompt="hi", n=2, echo=True, logprobs=0)
        result = output("a", "bcd", logprobs=True)
        chunks = streamed(request, result, seed=seed)
        expected = whole(request, result)["choices"]
        assert [choice["text"] for choice in expected] == ["hia", "hibcd"]
        assert joined_completion(chunks) == {choice["index"]: choice for choice in expected}

    def test_an_echo_without_new_tokens_is_one_chunk(self):
        request = completion(prompt="hi", echo=True, logprobs=0, max_tokens=0)
        (chunk,) = streamed(request, output("", logprobs=True, reason="length"))
        (choice,) = chunk["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
        assert choice["logprobs"]["tokens"] == ["h", "i"]
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5]


class TestTokenIds:
    @pytest.mark.parametrize("make", [chat, completion])
    @pytest.mark.parametrize("seed", SEEDS)
    def test_they_add_up_where_they_are_wanted(self, make, seed):
        request = make(n=2, return_token_ids=True)
        result = output("first", "2nd")
        body = whole(request, result)
        found, prompts = {0: [], 1: []}, []
        for chunk in streamed(request, result, seed=seed):
            (choice,) = chunk["choices"]
            found[choice["index"]] += choice.get("token_ids", [])
            prompts += [ids for part in (chunk, choice) if (ids := part.get("prompt_token_ids"))]
        assert found == {c["index"]: c["token_ids"] for c in body["choices"]}
        assert found == {0: list(b"first"), 1: list(b"2nd")}
        assert prompts == [HI.token_ids] * 2
        asked = body if make is chat else body["choices"][0]
        assert asked["prompt_token_ids"] == HI.token_ids

    @pytest.mark.parametrize("make", [chat, completion])
    def test_they_come_without_certain_text(self, make):
        answer = streamed_answer(make(return_token_ids=True), [HI], TOKENIZER, **HEAD)
        (chunk,) = answer.push(0, Delta("r", 0, "", (97,), None))
        assert chunk.choices[0].token_ids == [97]

    @pytest.mark.parametrize("make", [chat, completion])
    def test_without_the_wish_there_are_none(self, make):
        bodies = [whole(make(), output("a")), *streamed(make(), output("a"))]
        assert all("token_ids" not in str(body) for body in bodies)

    def test_they_name_tokens_of_completions(self):
        request = completion(
            prompt="hi", echo=True, logprobs=2, return_tokens_as_token_ids=True, n=2
        )
        result = output("ab", "", logprobs=True)
        body = whole(request, result)["choices"]
        names = [f"token_id:{token}" for token in b"hiab"]
        assert body[0]["logprobs"]["tokens"] == names
        assert body[0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
        assert body[0]["logprobs"]["top_logprobs"][3] == {names[3]: -0.5, names[2]: -2.0}
        chunks = joined_completion(streamed(request, result))
        assert chunks == {choice["index"]: choice for choice in body}

    def test_they_name_tokens_of_chats(self):
        request = chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
        result = output("b", logprobs=True)
        ((choice,), found) = whole(request, result)["choices"], streamed(request, result)
        (entry,) = choice["logprobs"]["content"]
        assert entry["token"] == "token_id:98"
        assert entry["bytes"] == [98]
        assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:98", "token_id:97"]
        assert joined_chat(found)[0]["logprobs"] == [entry]


def joined_completion(chunks):
    choices = {}
    for chunk in chunks:
        assert (chunk["object"], chunk["id"]) == ("text_completion", "cmpl-7")
        for piece in chunk["choices"]:
            choice = choices.setdefault(piece["index"], piece)
            if choice is not piece:
                assert choice["finish_reason"] is None
                choice["text"] += piece["text"]
                choice["finish_reason"] = piece["finish_reason"]
                for name, values in (piece["logprobs"] or {}).items():
                    choice["logprobs"][name] += values
    return choices


@pytest.mark.parametrize("make", [chat, completion])
class TestUsage:
    def test_without_it_no_chunk_has_the_field(self, make):
        for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
            chunks = streamed(make(stream_options=options), output("abc"))
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)

    def test_the_last_chunk_has_that_of_the_whole_answer(self, make):
        result = output("abc", "de")
        *chunks, last = streamed(make(n=2, **USAGE), result)
        assert last["choices"] == []
        assert last["usage"] == whole(make(n=2), result)["usage"]
        assert last["usage"]["total_tokens"] == 7
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)

    def test_continuous_counts_grow_to_the_last(self, make):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = streamed(make(n=2, stream_options=options), output("abc", "de"))
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == last["usage"]["completion_tokens"] == 5
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}

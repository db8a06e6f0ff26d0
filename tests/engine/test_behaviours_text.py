"""Text comes out whole, in order, and ends where it should (B23-B26)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.outputs import Delta
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer
from tests.engine.asks import FORCE, only
from tests.engine.mini import Mini, drain, greedy, prompts, run, tokens
from tests.engine.teacher import recite

HARD = "ḍ\u2019 👋🏽 你好 да 👩\u200d💻"
GOLDEN = Path(__file__).parents[1] / "golden" / "llama-gqa"
EOS, EOS_TEXT = 258, "<|im_end|>"
"""Of the golden models' tokenizer."""


@pytest.fixture(scope="module")
def words(mini: Mini) -> Mini:
    """MINI with a tokenizer that has tokens of several characters, and special ones."""
    return replace(mini, tokenizer=Tokenizer.from_directory(GOLDEN))


def joined(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_characters_of_several_tokens_stream_whole(mini: Mini) -> None:
    """B23, byte by byte: a character appears with its last byte, and never as U+FFFD."""
    script = list(HARD.encode())
    output, deltas = recite(mini.engine(), script, greedy(len(script)))
    assert only(output) == script
    assert output.outputs[0].text == joined(deltas) == HARD == mini.tokenizer.decode(script)
    assert [d.text for d in deltas if d.text] == list(HARD)
    assert "\ufffd" not in joined(deltas)


def test_a_character_cut_off_by_max_tokens(mini: Mini) -> None:
    """Its bytes are shown as U+FFFD with the last delta, not before."""
    script = list("好👋".encode())
    for count in range(1, len(script)):
        output, deltas = recite(mini.engine(), script, greedy(count))
        assert output.outputs[0].text == joined(deltas) == mini.tokenizer.decode(script[:count])
        assert "\ufffd" not in joined(deltas[:-1])


def test_output_continues_the_prompts_last_character(mini: Mini) -> None:
    first, *rest = "é!".encode()
    output, _ = recite(mini.engine(), rest, greedy(len(rest)), prompt=(72, first))
    assert output.outputs[0].text.endswith("!")
    assert len(only(output)) == len(rest)


LETTERS = [*range(97, 123), 32, *range(259, 300)]
"""Tokens of plain text in the golden tokenizer: single characters and whole words."""


def test_every_stop_string_of_a_text(words: Mini) -> None:
    """B24: all substrings of 2 to 8 characters; nothing of the stop string is ever shown."""
    prompt = prompts([9], seed=60)[0]
    ask = greedy(48, allowed_token_ids=LETTERS, frequency_penalty=1.0)
    whole = run(words.engine(), [(prompt, ask)])[0].outputs[0]
    pieces = [words.tokenizer.decode([token]) for token in whole.token_ids]
    text = whole.text
    assert text == "".join(pieces)
    assert len(text) >= 60
    assert max(map(len, pieces)) > 1
    ends = np.cumsum([len(piece) for piece in pieces])
    stops = sorted({text[i : i + n] for n in range(2, 9) for i in range(60 - n)})
    engine = words.engine()
    ids = {engine.submit(prompt, replace(ask, stop=stop)): stop for stop in stops}
    streams: dict[str, list[Delta]] = {request_id: [] for request_id in ids}
    for delta in drain(engine):
        streams[delta.request_id].append(delta)
    for request_id, stop in ids.items():
        sample = engine.take(request_id).outputs[0]
        first = text.index(stop)
        assert sample.text == joined(streams[request_id]) == text[:first]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        used = int(np.searchsorted(ends, first + len(stop)))
        assert sample.token_ids == whole.token_ids[: used + 1]
    assert len(stops) > 300


def test_stop_strings_in_the_output(mini: Mini) -> None:
    script = list(b"one, two, three")
    engine = mini.engine
    for include, want in ((False, "one, "), (True, "one, two,")):
        ask = greedy(15, stop=["xyz", "two,", "three"], include_stop_str_in_output=include)
        output, deltas = recite(engine(), script, ask)
        assert output.outputs[0].text == joined(deltas) == want
        assert output.outputs[0].stop_reason == "two,"
        assert only(output) == script[:9]
    # What was held back as the possible beginning of a stop string is shown at the end.
    output, deltas = recite(engine(), script, greedy(15, stop=["three!"]))
    assert output.outputs[0].text == joined(deltas) == "one, two, three"
    assert output.outputs[0].finish_reason == "length"
    # The stop string may be completed by the very last token.
    output, _ = recite(engine(), script, greedy(15, stop="three"))
    assert output.outputs[0].text == "one, two, "
    assert output.outputs[0].finish_reason == "stop"


def test_stop_string_over_characters_of_several_tokens(mini: Mini) -> None:
    script = list("你好👋🏽!".encode())
    output, deltas = recite(mini.engine(), script, greedy(len(script), stop="👋🏽"))
    assert output.outputs[0].text == joined(deltas) == "你好"
    assert len(only(output)) == len("你好👋🏽".encode())


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_empty_stop_strings_are_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match="stop has an empty string"):
        greedy(4, stop=stop)


@pytest.mark.parametrize("stop", [5, [1], ["a", None], {"a": 1}])
def test_stop_must_be_strings(stop: Any) -> None:
    with pytest.raises(ValueError, match=r"stop=.* must be a string or a list of strings"):
        greedy(4, stop=stop)


def test_no_stop_strings(mini: Mini) -> None:
    prompt = prompts([5])[0]
    outputs = run(mini.engine(), [(prompt, greedy(6, stop=stop)) for stop in ([], (), None)])
    assert tokens(outputs) == [[mini.oracle.greedy(prompt, 6)[0]]] * 3
    with pytest.raises(ValueError, match="detokenize"):
        greedy(6, stop="a", detokenize=False)


YES = [*b"Yes, it is."]
SPECIAL = {"skip_special_tokens": False}
SHOWN = {"skip_special_tokens": False, "include_stop_str_in_output": True}
ENDS: list[tuple[list[int], dict[str, Any], int, str, str, int | str | None]] = [
    # script, parameters, tokens, text, finish reason, stop reason
    ([*YES, EOS], {}, 12, "Yes, it is.", "stop", None),
    ([*YES, EOS], SPECIAL, 12, "Yes, it is.", "stop", None),
    ([*YES, EOS], SHOWN, 12, "Yes, it is." + EOS_TEXT, "stop", None),
    ([*YES, EOS], {"stop_token_ids": [EOS]}, 12, "Yes, it is.", "stop", None),
    ([*YES, EOS], {"stop_token_ids": [EOS], "ignore_eos": True}, 12, "Yes, it is.", "stop", None),
    ([*YES, EOS, *YES], {"ignore_eos": True}, 20, "Yes, it is.Yes, it ", "length", None),
    (YES, {"stop_token_ids": [ord("i"), 5]}, 6, "Yes, ", "stop", ord("i")),
    (YES, {"stop_token_ids": [ord(".")]}, 11, "Yes, it is", "stop", ord(".")),
    (YES, {"stop_token_ids": [ord("s")], **SHOWN}, 3, "Yes", "stop", ord("s")),
    (YES, {"stop": "it"}, 7, "Yes, ", "stop", "it"),
    (YES, {"stop": "s", "stop_token_ids": [ord("s")]}, 3, "Ye", "stop", ord("s")),
    ([EOS], {}, 1, "", "stop", None),
    (YES, {"max_tokens": 1}, 1, "Y", "length", None),
    ([EOS], {"max_tokens": 1}, 1, "", "stop", None),
    (YES, {"max_tokens": 2, "stop_token_ids": [ord("e")]}, 2, "Y", "stop", ord("e")),
    (YES * 3, {"max_tokens": None}, 30, ("Yes, it is." * 3)[:30], "length", None),
    (YES, {"detokenize": False, "max_tokens": 3}, 3, "", "length", None),
]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("script", "fields", "count", "text", "finish", "stop"), ENDS)
def test_how_a_sample_ends(
    words: Mini,
    asynchronous: bool,
    script: list[int],
    fields: dict[str, Any],
    count: int,
    text: str,
    finish: str,
    stop: int | str | None,
) -> None:
    """B26: end tokens are counted, and shown only on request; the text before them is whole."""
    engine = words.engine(eos=frozenset({EOS}), max_len=31, asynchronous=asynchronous)
    ask = SamplingParams(temperature=0, **{"max_tokens": 20, **fields})
    output, deltas = recite(engine, script, ask)
    sample = output.outputs[0]
    assert sample.text == joined(deltas) == text
    assert sample.token_ids == script[:count]
    assert (sample.finish_reason, sample.stop_reason) == (finish, stop)
    assert [d.finish_reason for d in deltas if d.finish_reason is not None] == [finish]
    assert deltas[-1].finish_reason == finish


def test_special_tokens_within_the_text(words: Mini) -> None:
    script = [*b"a", 257, *b"b", 256, *b"c"]
    for skip, want in ((True, "abc"), (False, "a<|im_start|>b<|endoftext|>c")):
        output, deltas = recite(words.engine(), script, greedy(5, skip_special_tokens=skip))
        assert output.outputs[0].text == joined(deltas) == want


def test_the_first_token_may_end_it(words: Mini) -> None:
    """B21: nothing but the end token, for a real model and not a script."""
    engine = words.engine(eos=frozenset({EOS}))
    ask = SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS: FORCE})
    sample = run(engine, [(prompts([5])[0], ask)])[0].outputs[0]
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("", [EOS], "stop")

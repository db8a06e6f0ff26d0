from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.detokenizer import Detokenizer
from jaxserve.tokenizer import Tokenizer
from tests.tokenizer.made import BOS, EOS, byte_tokenizer, sentencepiece

MIXED = "d\u0323\u2019 \U0001f44b\U0001f3fd \u4f60\u597d \u0434\u0430 \U0001f469\u200d\U0001f4bb"
BYTES = byte_tokenizer()


def deltas(tokenizer: Tokenizer, ids, prompt=(), skip=True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, list(prompt), skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("prompt", ["", "Hello world", "你", "<|im_start|>assistant\n"])
def test_characters_over_several_tokens(smollm, prompt):
    ids = smollm.encode(MIXED)
    got = deltas(smollm, ids, smollm.encode(prompt))
    assert "".join(got) == MIXED == smollm.decode(ids)
    assert all("\ufffd" not in delta for delta in got)
    assert got[-1] == ""


def test_one_byte_at_a_time():
    got = deltas(BYTES, MIXED.encode())
    assert "".join(got) == MIXED
    assert max(map(len, got)) == 1


def test_text_comes_as_soon_as_it_is_certain():
    assert deltas(BYTES, "aé!".encode()) == ["a", "", "é", "!", ""]


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=40), prompt=st.binary(max_size=12))
def test_any_text_after_any_prompt(text, prompt):
    got = deltas(BYTES, text.encode(), prompt)
    halves = re.sub("^\ufffd+", "", "".join(got))
    assert "".join(got) == text or halves.endswith(text)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=120))
def test_invalid_bytes_become_replacement_characters(data):
    got = "".join(deltas(BYTES, data))
    want = data.decode("utf-8", "replace")
    assert re.sub("\ufffd+", "\ufffd", got) == re.sub("\ufffd+", "\ufffd", want)


def test_endless_invalid_bytes_are_given_out():
    got = deltas(BYTES, [0xC3] * 1000 + list("é".encode()))
    assert sum(map(bool, got)) > 10
    assert "".join(got).endswith("é")


def test_the_unfinished_end_is_flushed():
    assert deltas(BYTES, b"a\xe4\xbd") == ["a", "", "", "\ufffd"]
    detokenizer = Detokenizer(BYTES, [], True)
    detokenizer.push(0xE4)
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_prompt_that_ends_within_a_character():
    """The output's text is that of its own bytes; the prompt's are never repeated."""
    got = deltas(BYTES, b"\xa0ok", "good \u4f60".encode()[:-1])
    assert "".join(got) == "\ufffdok"


def test_a_true_replacement_character():
    assert "".join(deltas(BYTES, "a\ufffdb\ufffd".encode())) == "a\ufffdb\ufffd"


def test_special_tokens():
    ids = [104, EOS, 105, BOS]
    assert "".join(deltas(BYTES, ids)) == "hi"
    assert "".join(deltas(BYTES, ids, skip=False)) == "h<eos>i<bos>"
    split = [0xC3, EOS, 0xA9]
    assert "".join(deltas(BYTES, split)) == BYTES.decode(split) == "é"


def test_many_special_tokens_hold_nothing_back():
    assert deltas(BYTES, [EOS] * 200 + [97])[-2:] == ["a", ""]


def test_ids_outside_the_vocabulary_have_no_text():
    assert "".join(deltas(BYTES, [97, 5000, 98, 5001])) == "ab"


def test_smollm_random_tokens(smollm):
    """Whole sequences of arbitrary ids, as a badly trained model gives them."""
    for seed in range(30):
        ids = [(seed * 7919 + i * 104729) % smollm.vocab_size for i in range(60)]
        got = "".join(deltas(smollm, ids, skip=False))
        assert got == smollm.decode(ids, skip_special_tokens=False)


# SentencePiece.


def test_the_first_space_is_kept_after_a_prompt(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    ids = [tokenizer.backend.token_to_id(piece) for piece in ("▁wor", "ll", "▁the")]
    assert "".join(deltas(tokenizer, ids, tokenizer.encode("hello"))) == " worll the"
    assert "".join(deltas(tokenizer, ids, [])) == "worll the" == tokenizer.decode(ids)


def test_byte_pieces(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    text = "hello 😃\n你 the"
    assert "".join(deltas(tokenizer, tokenizer.encode(text))) == text


def test_a_byte_that_spoils_the_one_before_it(tmp_path):
    """The decoder would take back "A" once an invalid byte follows it: what is out stays out."""
    tokenizer = sentencepiece(tmp_path)
    ids = [tokenizer.backend.token_to_id(t) for t in ("<0x41>", "<0xE4>", "he", "▁the")]
    assert deltas(tokenizer, ids) == ["A", "", "\ufffdhe", " the", ""]

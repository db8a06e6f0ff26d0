from __future__ import annotations

import json
import random
import warnings

import pytest
from tokenizers import processors

from jaxserve.tokenizer import Tokenizer
from tests.tokenizer.made import BOS, EOS, THINK, byte_tokenizer, sentencepiece

LACKING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D}
"""Control characters whose bytes SmolLM2's vocabulary does not have."""


def random_strings(count: int, seed: int = 0) -> list[str]:
    """Strings over all of Unicode that is assigned or private, most of it rare."""
    ranges = [(0x00, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000)]
    generator = random.Random(seed)
    strings = []
    for _ in range(count):
        length = generator.randrange(40)
        points = (generator.randrange(*generator.choice(ranges)) for _ in range(length))
        strings.append("".join(chr(point) for point in points if point not in LACKING))
    return strings


def test_smollm_round_trips_unicode(smollm):
    for text in random_strings(200):
        ids = smollm.encode(text)
        assert smollm.decode(ids) == text
        assert b"".join(map(smollm.token_bytes, ids)).decode() == text


def test_smollm_leaves_out_what_its_vocabulary_lacks(smollm):
    """As the original tokenizer does: it has no token for these bytes and none for unknown."""
    for point in LACKING:
        assert smollm.encode(f"a{chr(point)}b") == smollm.encode("a") + smollm.encode("b")


def test_smollm_cuts_before_every_digit(smollm):
    assert smollm.encode("x  12") == [104, 256, 33, 34]
    assert smollm.encode("\n\n3") == [1116, 35]


def test_smollm_measured_counts(smollm):
    text = "d\u0323\u2019 \U0001f44b\U0001f3fd \u4f60\u597d \u0434\u0430 \U0001f469\u200d\U0001f4bb"
    ids = smollm.encode(text)
    assert len(ids) == 25
    assert sum("\ufffd" in smollm.decode([i]) for i in ids) == 20
    assert smollm.decode(ids) == text


def test_transformers_agrees(smollm, demo_source):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(demo_source.files)
    texts = ["What is 2+2?", "x  12\n\n3", "hi<|im_end|>\n<|im_start|>", *random_strings(20, 1)]
    for text in texts:
        assert theirs(text)["input_ids"] == smollm.encode(text)
    messages = [{"role": "user", "content": "What is 2+2?"}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert rendered["input_ids"] == smollm.encode_chat(messages)
    assert theirs.eos_token_id == smollm.eos_token_ids[0]


# BOS.


@pytest.mark.parametrize("adds", [True, False])
def test_bos_in_front_of_plain_text(adds):
    named = {"bos_token": "<bos>", "add_bos_token": adds}
    tokenizer = byte_tokenizer(named)
    start = [BOS] if adds else []
    assert tokenizer.encode("a") == [*start, 97]
    assert tokenizer.encode("<bos>a") == [BOS, 97]
    assert tokenizer.encode("") == start
    assert tokenizer.encode("a<bos>") == [*start, 97, BOS]


def test_bos_as_the_post_processor_says():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("a") == [97]
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )
    again = Tokenizer(tokenizer.backend, {"bos_token": "<bos>"})
    assert again.encode("a") == [BOS, 97]


def test_no_bos_without_a_token_for_it():
    assert byte_tokenizer({"add_bos_token": True}).encode("a") == [97]
    unknown = byte_tokenizer({"add_bos_token": True, "bos_token": "<no such token>"})
    assert (unknown.bos_token_id, unknown.encode("a")) == (None, [97])


def test_smollm_has_a_bos_but_does_not_add_it(smollm):
    assert smollm.bos_token_id == 1
    assert not smollm.adds_bos
    assert smollm.encode("") == []
    assert smollm.encode("What")[0] != 1


# Special tokens and single tokens.


def test_end_tokens():
    assert byte_tokenizer().eos_token_ids == (EOS,)
    assert byte_tokenizer({}).eos_token_ids == ()


def test_special_tokens_of_plain_text_are_read():
    assert byte_tokenizer().encode("a<eos>b<think>") == [97, EOS, 98, THINK]


def test_special_tokens_are_left_out_of_text_by_default():
    tokenizer = byte_tokenizer()
    ids = [BOS, 104, 105, THINK, EOS]
    assert tokenizer.decode(ids) == "hi<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>hi<think><eos>"
    assert tokenizer.decode(ids[:-1]) == tokenizer.decode(ids)


def test_text_of_one_token(smollm):
    assert smollm.token_text(2) == "<|im_end|>"
    assert smollm.token_text(smollm.encode(" world")[0]) == " world"
    assert smollm.token_text(60000) == ""
    half = smollm.encode("你")[0]
    assert smollm.token_text(half) == "\ufffd"
    assert smollm.token_bytes(half) == "你".encode()[: len(smollm.token_bytes(half))]


def test_ids_outside_the_vocabulary_have_no_text(smollm):
    assert smollm.decode([smollm.vocab_size, *smollm.encode("a")]) == "a"


# SentencePiece with byte fallback.


def test_sentencepiece_pieces(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    pieces = tokenizer.backend.encode("hello wor the", add_special_tokens=False).tokens
    assert pieces == ["▁he", "ll", "o", "▁wor", "▁the"]
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("<s>hello") == tokenizer.encode("hello")


@pytest.mark.parametrize(
    "text", ["\n", " ", "  ", "hello", " hello", "\u9f98", "😃", "a\u0323 b", "x\ty\r\nz", "zzz"]
)
def test_byte_fallback_round_trip(tmp_path, text):
    tokenizer = sentencepiece(tmp_path)
    ids = tokenizer.encode(text)
    assert 0 not in ids
    assert tokenizer.decode(ids) == text
    assert b"".join(map(tokenizer.token_bytes, ids[1:])).decode() == " " + text


def test_byte_pieces_decode_to_their_character(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    ids = [tokenizer.backend.token_to_id(f"<0x{byte}>") for byte in ("F0", "9F", "98", "83")]
    assert tokenizer.decode(ids) == "😃"
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x83"]
    assert tokenizer.decode([tokenizer.backend.token_to_id("<0x0A>")]) == "\n"


def test_sentencepiece_options(tmp_path):
    plain = sentencepiece(
        tmp_path,
        **{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": False},
    )
    assert not plain.adds_bos
    assert (
        plain.backend.encode("hello").tokens == ["hell", "<0x6F>"]
        or plain.decode(plain.encode("hello")) == "hello"
    )
    assert plain.decode(plain.encode(" hello")) == " hello"
    assert plain.backend.encode("[INST]he").tokens == ["[INST]", "he"]


# Files.


def test_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; give .* with --tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}'])
def test_damaged_tokenizer(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"is not a readable tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_damaged_tokenizer_config(tmp_path):
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_files_beside_the_tokenizer(tmp_path):
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).chat_template is None
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<eos>"}))
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    config = {"bos_token": {"content": "<bos>"}, "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (EOS,))
    assert tokenizer.chat_template == "A"
    (tmp_path / "chat_template.jinja").write_text("C")
    assert Tokenizer.load(tmp_path).chat_template == "C"
    assert Tokenizer.load(tmp_path / "tokenizer.json", "D").chat_template == "D"

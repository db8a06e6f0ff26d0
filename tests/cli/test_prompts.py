"""Where prompts come from and in which formats."""

import re

import pytest

from jaxserve.cli.prompts import Prompt, read_prompts


def test_arguments_come_before_the_file(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("c\n\nd")
    found = read_prompts(["a", "b"], str(file))
    assert [prompt.text for prompt in found] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\r\ntwo", ["one", "two"]),
        ("a\x0cb\u2028c\nd".encode(), ["a\x0cb\u2028c", "d"]),
        (b"  indented\n", ["  indented"]),
        (b'{"a": 1}\n', ['{"a": 1}']),
        (b"{ code }\n", ["{ code }"]),
    ],
)
def test_text_file(tmp_path, content, texts):
    file = tmp_path / "p.txt"
    file.write_bytes(content)
    assert [prompt.text for prompt in read_prompts([], str(file))] == texts


def test_json_lines(tmp_path):
    file = tmp_path / "p.txt"
    file.write_text(
        '{"prompt": "a\\nb"}\n\n{"prompt_token_ids": [1, 2]}\n{"prompt": "c", "priority": 3}\n'
    )
    assert read_prompts([], str(file)) == [
        Prompt("a\nb"),
        Prompt(None, [1, 2]),
        Prompt("c", None, 3),
    ]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", b"not json\n", ["p.jsonl, line 1"]),
        ("p.txt", b'{"prompt": "a"}\n{"prompt": 5}\n', ["p.txt, line 2", "prompt"]),
        ("p.txt", b'{"prompt": "a"}\nplain\n', ["p.txt, line 2"]),
        ("p.txt", b'{"prompt": "a", "prompt_token_ids": [1]}\n', ["line 1", "give one of"]),
        ("p.txt", b'{"prompt": "a", "max_tokens": 5}\n', ["line 1", "max_tokens"]),
        ("p.jsonl", b'{"prompt_token_ids": [1.5]}\n', ["line 1", "float"]),
        ("p.txt", b"ok\n\xff\xfe\n", ["not valid UTF-8 at byte 3"]),
        ("p.txt", b"\n\n", ["no prompt"]),
    ],
)
def test_bad_file(tmp_path, name, content, words):
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        read_prompts([], str(file))
    assert all(word in str(caught.value) for word in words)


def test_argument_that_is_not_text():
    with pytest.raises(ValueError, match="prompt 2 is not valid UTF-8"):
        read_prompts(["a", "\udcff"], None)

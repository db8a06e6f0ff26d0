from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.detokenizer import Detokenizer
from jaxserve.stop_strings import StopStrings

TEXT = "The quick own fox — naïve 你好 👩‍💻 jumped over three lazy dogs."


def run(chunks, stops, include=False):
    watcher = StopStrings(stops, include)
    shown = [watcher.push(chunk) for chunk in chunks]
    return "".join(shown) + watcher.flush(), watcher.matched


@pytest.mark.parametrize("include", [False, True])
def test_every_substring_over_a_token_border(smollm, include):
    ids = smollm.encode(TEXT)
    detokenizer = Detokenizer(smollm, [], True)
    chunks = [detokenizer.push(i) for i in ids]
    assert "".join(chunks) == TEXT
    assert len(TEXT) >= 60
    borders = {sum(map(len, chunks[:i])) for i in range(1, len(chunks))}
    tried = 0
    for start in range(len(TEXT)):
        for length in range(2, 9):
            stop = TEXT[start : start + length]
            if len(stop) < length or not borders & set(range(start + 1, start + length)):
                continue
            first = TEXT.index(stop)
            want = TEXT[: first + len(stop)] if include else TEXT[:first]
            assert run(chunks, [stop], include) == (want, stop)
            tried += 1
    assert tried > 150


def test_the_beginning_of_a_stop_string_never_leaks():
    watcher = StopStrings(["own fox"])
    assert [watcher.push(c) for c in ("br", "own", " f", "ox", "!")] == ["br", "", "", "", ""]
    assert watcher.matched == "own fox"
    assert watcher.flush() == ""


def test_what_was_held_back_for_nothing_is_shown():
    watcher = StopStrings(["own fox"])
    assert [watcher.push(c) for c in ("own", " f", "ree ow")] == ["", "", "own free "]
    assert watcher.flush() == "ow"
    assert watcher.matched is None


def test_the_first_to_be_complete_wins():
    assert run(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert run(["abcd"], ["bcd", "abcd"]) == ("", "abcd")
    assert run(["xaab"], ["aab", "ab"], include=True) == ("xaab", "aab")


def test_overlapping_beginnings():
    assert run(["aa", "ab"], ["aab"]) == ("a", "aab")
    assert run(list("ababac"), ["abac"]) == ("ab", "abac")


def test_none():
    assert run(["a", "b"], []) == ("ab", None)


def reference(text, stops, include):
    """Character by character, over the whole text."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    chunks=st.lists(st.text("ab\u4f60", max_size=5), max_size=8),
    stops=st.lists(st.text("ab\u4f60", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_any_cut_gives_the_same(chunks, stops, include):
    want = reference("".join(chunks), stops, include)
    assert run(chunks, stops, include) == want
    assert run(list("".join(chunks)), stops, include) == want


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(st.text("ab", max_size=3), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_more_is_held_back_than_may_begin_a_stop_string(chunks, stops):
    watcher = StopStrings(stops)
    seen, shown = "", ""
    for chunk in chunks:
        seen += chunk
        shown += watcher.push(chunk)
        if watcher.matched is None:
            held = seen[len(shown) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)

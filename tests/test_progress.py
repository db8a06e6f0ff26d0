from __future__ import annotations

import io
import re
import threading

import pytest

from jaxserve.progress import Progress


class Screen(io.StringIO):
    """A terminal that tells when something was written to it."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        self.written.set()


def test_quick_work_is_silent():
    screen = Screen(terminal=False)
    with Progress("compiling", 3, "executables", stream=screen, patience=60) as progress:
        progress.advance()
    assert screen.getvalue() == ""


def test_slow_work_is_two_lines_of_a_file():
    screen = Screen(terminal=False)
    with Progress("compiling", 3, "executables", stream=screen, patience=0) as progress:
        assert screen.written.wait(10)
        progress.advance("ignored")
    lines = screen.getvalue().splitlines()
    assert lines[0] == "compiling 3 executables: 0 done ..."
    assert re.fullmatch(r"compiling 3 executables: done after \d+\.\d s", lines[1])
    assert len(lines) == 2


def test_slow_work_is_one_line_of_a_terminal():
    screen = Screen(terminal=True)
    with Progress("loading", 2, "tensors", stream=screen, patience=0) as progress:
        assert screen.written.wait(10)
        progress.advance()
    shown = screen.getvalue().split("\r\x1b[K")
    assert shown[:3] == ["", "loading 2 tensors: 0 done ...", "loading 2 tensors: 1 done ..."]
    assert re.fullmatch(r"loading 2 tensors: done after \d+\.\d s\n", shown[3])


def test_work_without_steps_that_fails():
    screen = Screen(terminal=False)

    def fail() -> None:
        with Progress("reading m.gguf once", stream=screen, patience=0):
            assert screen.written.wait(10)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    first, last = screen.getvalue().splitlines()
    assert first == "reading m.gguf once ..."
    assert last.startswith("reading m.gguf once: given up after ")

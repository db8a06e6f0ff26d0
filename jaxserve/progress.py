"""What a slow start is doing, on stderr; silent about everything that is quick.

A terminal gets one line that is redrawn, anything else a line when it turns out to be slow and
one at the end.  Knows nothing about the work.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TextIO

PATIENCE = 1.0
"""Seconds of silence."""


class Progress:
    """Announces a piece of work that takes longer than `PATIENCE`.  A context manager.

    Args:
        doing: e.g. "compiling".
        total: how many steps it has, if it has any.
        unit: what the steps are, e.g. "executables".
        stream: where to write; stderr as it is at that time if absent.
        patience: seconds before the first line.
    """

    def __init__(
        self,
        doing: str,
        total: int | None = None,
        unit: str = "",
        *,
        stream: TextIO | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._doing = doing
        self._total = total
        self._unit = unit
        self._stream = stream
        self._done = 0
        self._shown = False
        self._ended = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(patience, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        self._start = time.perf_counter()
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if not self._shown:
                return
            how = "done" if kind is None else "given up"
            seconds = time.perf_counter() - self._start
            self._write(f"{self._what()}: {how} after {seconds:.1f} s", "\n")

    def advance(self, *_: object) -> None:
        """One more step is done; arguments are ignored, so that it can be a callback."""
        with self._lock:
            self._done += 1
            if self._shown and self._is_terminal():
                self._write(self._line(), "")

    def _show(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._shown = True
            self._write(self._line(), "" if self._is_terminal() else "\n")

    def _what(self) -> str:
        count = "" if self._total is None else f" {self._total} {self._unit}"
        return f"{self._doing}{count}"

    def _line(self) -> str:
        return self._what() + ("" if self._total is None else f": {self._done} done") + " ..."

    def _write(self, text: str, end: str) -> None:
        redraw = "\r\x1b[K" if self._is_terminal() else ""
        print(redraw + text, end=end, file=self._stream or sys.stderr, flush=True)

    def _is_terminal(self) -> bool:
        return (self._stream or sys.stderr).isatty()

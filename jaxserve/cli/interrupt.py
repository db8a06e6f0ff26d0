"""Turn the first Ctrl-C into a flag, so that work stops between two steps of the engine.

An exception in the middle of a step would leave the engine in an unknown state.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """True once one of the signals has arrived; a second signal then acts as usual.

    Signals are caught inside a `with` block only.
    """

    def __init__(self, *signums: signal.Signals) -> None:
        """Name the signals."""
        self._signums = signums
        self._previous: dict[int, Any] = {}
        self.signum: int | None = None

    def __bool__(self) -> bool:
        return self.signum is not None

    def __enter__(self) -> Interrupt:
        for signum in self._signums:
            self._previous[signum] = signal.signal(signum, self._catch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

"""Stop strings over streamed text: what may be shown, what is held back, what has ended it.

Knows text only; tokens and requests are the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one sample for stop strings.

    The one that is complete first ends the text; of several that the same character completes,
    the longest.  So the result does not depend on how the text is cut into pushes.

    Args:
        stops: non-empty strings; none of them is fine.
        include_in_output: whether the stop string itself belongs to the output.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Add text and return what may be shown now.  After a match nothing is."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        found = self._first(text)
        if found is None:
            held = self._undecided(text)
            self._held = text[len(text) - held :]
            return text[: len(text) - held]
        end, start, self.matched = found
        self._held = ""
        return text[: end if self._include else start]

    def flush(self) -> str:
        """Return the text that was held back: no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, int, str] | None:
        """End, start and string of the match that is complete first."""
        starts = ((text.find(stop), stop) for stop in self._stops)
        matches = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(matches, default=None)

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text that may turn out to begin a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(text), len(stop) - 1), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

"""What the engine tells whoever counts: steps, tokens and requests as they end.

An `Observer` is called on the engine's own thread, in the step path: its methods must be quick
and must not raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.outputs import RequestOutput


class StepRecord(NamedTuple):
    """One dispatch, after its results were read; times in seconds."""

    shape: str
    """Name of the compiled shape, such as "decode8" or "mixed32x512"."""
    num_steps: int
    """Iterations that the device ran; more than one only in pure decode."""
    device_s: float
    """From the dispatch's start, or the end of the one before, to its own end."""
    host_s: float
    """Time of this turn of the loop in which the host did not wait for the device."""
    num_chunk_tokens: int
    """Prompt tokens computed."""
    num_sampled: int
    """Tokens sampled."""
    num_rows: int
    """Model rows computed, padding included, of all steps."""
    num_running: int
    """Sequences with a slot, after the step."""
    num_waiting: int
    """Sequences without one, after the step."""


class Observer:
    """Does nothing; derive from it what counts."""

    def on_step(self, record: StepRecord) -> None:
        """A dispatch's results were read."""

    def on_tokens(self, ttfts: Sequence[float], gaps: Sequence[float]) -> None:
        """Samples received the tokens of a dispatch.

        Args:
            ttfts: from submit to now, of each request whose first tokens are among them.
            gaps: seconds between these tokens and the ones before each, as far as there are any;
                tokens of one dispatch come at once, so all but a sample's first gap are zero.
        """

    def on_end(self, output: RequestOutput) -> None:
        """The last sample of a request has ended, by whatever reason."""

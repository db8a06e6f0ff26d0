"""The two ways to run a step whose tokens constraints limit.

The masks of step n + 1 depend on the tokens of step n, its plan does not.  `WholeSteps` starts the
step once the masks are there; `SplitSteps` starts its first half before, and leaves the second,
which samples, to wait for them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxserve.flight import Flight
from jaxserve.runner import Runner
from jaxserve.shapes import StepShape


class MaskedSteps(Protocol):
    """How a plan with limited tokens gets to the device."""

    def choose(self, num_seqs: int, num_chunk_tokens: int) -> StepShape:
        """The shape that holds a plan."""

    def begin(self, flight: Flight) -> None:
        """Start what needs no masks."""

    def finish(self, flight: Flight, masks: npt.NDArray[np.int32]) -> None:
        """Start the rest, with masks as i32[slots, allowed_words]."""


class WholeSteps:
    """Where the host and the device share their cores, as on a CPU.

    There nothing is gained by computing while masks are filled, and threads of both would be in
    each other's way; one program on two idle cores was measured to be faster than two programs.
    """

    def __init__(self, runner: Runner) -> None:
        """Run steps of `runner`."""
        self._runner = runner

    def choose(self, num_seqs: int, num_chunk_tokens: int) -> StepShape:
        """See `MaskedSteps`."""
        return self._runner.shapes.choose(num_seqs, num_chunk_tokens)

    def begin(self, flight: Flight) -> None:
        """Nothing can be started yet."""

    def finish(self, flight: Flight, masks: npt.NDArray[np.int32]) -> None:
        """See `MaskedSteps`."""
        self._runner.set_masks(masks)
        flight.ticket = self._runner.run(flight.packed, flight.shape)


class SplitSteps:
    """Where the device would have to wait for the host."""

    def __init__(self, runner: Runner) -> None:
        """Run steps of `runner`."""
        self._runner = runner

    def choose(self, num_seqs: int, num_chunk_tokens: int) -> StepShape:
        """See `MaskedSteps`."""
        return self._runner.shapes.choose_split(num_seqs, num_chunk_tokens)

    def begin(self, flight: Flight) -> None:
        """See `MaskedSteps`."""
        flight.forwarded = self._runner.forward(flight.packed, flight.shape)

    def finish(self, flight: Flight, masks: npt.NDArray[np.int32]) -> None:
        """See `MaskedSteps`."""
        assert flight.forwarded is not None
        flight.ticket = self._runner.sample(flight.forwarded, flight.packed, masks, flight.shape)


def masked_steps(runner: Runner) -> MaskedSteps | None:
    """The way that a runner was made for; None if it cannot run such steps."""
    ways: dict[str, type[WholeSteps] | type[SplitSteps]] = {
        "whole": WholeSteps,
        "split": SplitSteps,
    }
    way = ways.get(runner.masked_steps)
    return None if way is None else way(runner)

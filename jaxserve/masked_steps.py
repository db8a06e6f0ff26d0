"""How a step whose tokens constraints limit gets to the device.

The masks of step n + 1 depend on the tokens of step n, its plan does not.  `WholeSteps` lets the
step ask the host for them while it runs; `SplitSteps` starts the step's first half before they are
known, and leaves the second, which samples, to wait for them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxserve.batch import address
from jaxserve.constraints import Constraints
from jaxserve.flight import Flight
from jaxserve.runner import Runner
from jaxserve.shapes import StepShape

WHOLE, SPLIT, OFF = "whole", "split", "off"


class Steps(Protocol):
    """How a plan gets to the device."""

    def choose(self, num_seqs: int, num_chunk_tokens: int) -> StepShape:
        """The shape that holds a plan."""

    def begin(self, flight: Flight) -> None:
        """Start what needs no masks of the host's: the flight has a ticket if that is all."""

    def finish(self, flight: Flight, masks: npt.NDArray[np.int32]) -> None:
        """Start the rest, with masks as i32[slots, allowed_words]."""


class PlainSteps:
    """Steps that are one program, started at once."""

    def __init__(self, runner: Runner) -> None:
        """Run steps of `runner`."""
        self._runner = runner

    def choose(self, num_seqs: int, num_chunk_tokens: int) -> StepShape:
        """See `Steps`."""
        return self._runner.shapes.choose(num_seqs, num_chunk_tokens)

    def begin(self, flight: Flight) -> None:
        """See `Steps`."""
        flight.ticket = self._runner.run(flight.packed, flight.shape)

    def finish(self, flight: Flight, masks: npt.NDArray[np.int32]) -> None:
        """Nothing is left."""
        raise AssertionError("a whole step has no second half")


class WholeSteps(PlainSteps):
    """Where program and host share their memory, as on a CPU.

    The ordinary program, which asks: several steps may be in a dispatch, and a dispatch on its way
    while the one before is computed, as without constraints.
    """

    def __init__(self, runner: Runner, constraints: Constraints) -> None:
        """Run steps of `runner`, which ask `constraints`."""
        super().__init__(runner)
        self._constraints = constraints

    def begin(self, flight: Flight) -> None:
        """See `Steps`."""
        flight.question, whom = self._constraints.question(flight.plan)
        address(flight.packed, whom)
        super().begin(flight)


class SplitSteps:
    """Where the device would have to wait for the host."""

    def __init__(self, runner: Runner) -> None:
        """Run steps of `runner`."""
        self._runner = runner

    def choose(self, num_seqs: int, num_chunk_tokens: int) -> StepShape:
        """See `Steps`."""
        return self._runner.shapes.choose_split(num_seqs, num_chunk_tokens)

    def begin(self, flight: Flight) -> None:
        """See `Steps`."""
        flight.forwarded = self._runner.forward(flight.packed, flight.shape)

    def finish(self, flight: Flight, masks: npt.NDArray[np.int32]) -> None:
        """See `Steps`."""
        assert flight.forwarded is not None
        flight.ticket = self._runner.sample(flight.forwarded, flight.packed, masks, flight.shape)


def masked_steps(runner: Runner, constraints: Constraints) -> Steps:
    """The way that a runner was made for; any if it cannot run such steps."""
    if runner.masked_steps == SPLIT:
        return SplitSteps(runner)
    return WholeSteps(runner, constraints)

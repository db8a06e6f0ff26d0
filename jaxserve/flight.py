"""A step on its way: what was planned, what the device was given, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jaxserve.constraints import Ended
from jaxserve.report import StepOutput
from jaxserve.runner import Forwarded, Ticket
from jaxserve.shapes import StepShape
from scheduler import StepPlan


@dataclass(eq=False, slots=True)
class Flight:
    """A step that was planned, and whose results the host has not read yet."""

    plan: StepPlan
    shape: StepShape
    packed: npt.NDArray[np.int32]
    question: int | None = None
    """Number of what it asks the host about, if it does."""
    ticket: Ticket | None = None
    """Absent until all of it is started."""
    forwarded: Forwarded | None = None
    """Its first half, if it runs in two."""
    prompt_report: jax.Array | None = None
    """Prompt log-probabilities of the step's chunk rows, if a sequence in it wants them."""


class Landed(NamedTuple):
    """A step's results on the host."""

    flight: Flight
    report: StepOutput
    prompts: StepOutput | None
    ended: Ended
    """What constraints have ended in it."""
    seconds: float
    """That the device took."""

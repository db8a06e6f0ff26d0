"""From the scheduler's plans to programs on the device, and to their reports.

Packs, starts and reads; knows slots, shapes and the two forms of a step.  Does not know what the
tokens mean: `jaxserve.recorder` does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jaxserve.batch import MASKED, BatchLayout, pack_batch
from jaxserve.carry import SlotPacker
from jaxserve.constraints import Constraints, Masks
from jaxserve.report import StepOutput
from jaxserve.request import Sample
from jaxserve.runner import Forwarded, Runner, Ticket
from jaxserve.shapes import StepShape
from jaxserve.stats import WAIT, StepMeter, Stopwatch
from scheduler import ScheduledTokens, Sequence, StepPlan


@dataclass(eq=False, slots=True)
class Flight:
    """A dispatched step whose results the host has not read yet."""

    plan: StepPlan
    shape: StepShape
    packed: npt.NDArray[np.int32]
    ticket: Ticket | None = None
    """Absent until the second half of a step in two halves is started."""
    forwarded: Forwarded | None = None
    """The first half of a step in two halves."""
    masks: Future[Masks] | None = None
    """What its second half waits for."""
    prompt_report: jax.Array | None = None
    """Prompt log-probabilities of the step's chunk rows, if a sequence in it wants them."""


class Landed(NamedTuple):
    """A step's results on the host."""

    report: StepOutput
    prompts: StepOutput | None
    seconds: float
    """That the device took."""


class Dispatcher:
    """Starts plans in the order in which they were made, and reads them in the same order."""

    def __init__(
        self,
        runner: Runner,
        samples: Mapping[Sequence, Sample],
        constraints: Constraints,
        meter: StepMeter,
    ) -> None:
        """Nothing is started yet.

        Args:
            runner: the device side.
            samples: of the sequences that have not ended; kept and looked at, not changed.
            constraints: of the sequences that have one.
            meter: told what the time of a turn was spent on.
        """
        self._runner = runner
        self._samples = samples
        self._constraints = constraints
        self._meter = meter
        self._packer = SlotPacker(runner.spec.sizes)
        self._layouts: dict[StepShape, BatchLayout] = {
            shape: runner.spec.batch_layout(shape) for shape in runner.shapes.all()
        }
        self._stopwatch = Stopwatch()

    def copy_pages(self, plan: StepPlan) -> None:
        """Move preempted sequences' pages; a plan that computes nothing may ask for that too."""
        for copy in plan.swapped_out:
            self._runner.swap_out(copy)
        for copy in plan.swapped_in:
            self._runner.swap_in(copy)

    def launch(self, plan: StepPlan) -> Flight:
        """Start a plan: the whole step, or its first half if constraints limit its tokens."""
        for seq in plan.admitted:
            self._admit(seq)
        self._meter.mark("admit")
        flight = self._launch_half(plan) if self._constraints.limit(plan) else self._launch(plan)
        self._stopwatch.start()
        self._meter.mark("dispatch")
        return flight

    def prepare(self, flight: Flight) -> None:
        """Start to fill the masks that a flight's second half waits for, if it does.

        What the flights before it have sampled must be recorded.
        """
        if flight.ticket is None and flight.masks is None:
            flight.masks = self._constraints.fill(flight.plan, flight.shape.rows)

    def complete(self, flight: Flight) -> Masks | None:
        """Start a flight's second half; the masks it was given, None if it has no halves."""
        if flight.forwarded is None:
            return None
        self.prepare(flight)
        assert flight.masks is not None
        masks = flight.masks.result()
        self._meter.mark("masks")
        runner, shape = self._runner, flight.shape
        flight.ticket = runner.sample(flight.forwarded, flight.packed, masks.words, shape)
        flight.prompt_report = self._score_prompts(flight.plan, flight.ticket, shape)
        self._meter.mark("dispatch")
        return masks

    def read(self, flight: Flight) -> Landed:
        """Wait for a flight's results."""
        assert flight.ticket is not None
        report = self._runner.read(flight.ticket)
        seconds = self._stopwatch.stop()
        prompts = None
        if flight.prompt_report is not None:
            prompts = self._runner.read_prompt_logprobs(flight.prompt_report)
        self._meter.mark(WAIT)
        return Landed(report, prompts, seconds)

    def _launch(self, plan: StepPlan) -> Flight:
        shape = self._runner.shapes.choose(len(plan.entries), plan.num_chunk_tokens)
        packed = pack_batch(plan, self._layouts[shape])
        self._meter.mark("pack")
        ticket = self._runner.run(packed, shape)
        prompts = self._score_prompts(plan, ticket, shape)
        return Flight(plan, shape, packed, ticket, prompt_report=prompts)

    def _launch_half(self, plan: StepPlan) -> Flight:
        shape = self._runner.shapes.choose_split(len(plan.entries), plan.num_chunk_tokens)
        layout = self._layouts[shape]
        packed = pack_batch(plan, layout)
        layout.views(packed)[4][self._constraints.rows(plan)] |= MASKED
        self._meter.mark("pack")
        return Flight(plan, shape, packed, forwarded=self._runner.forward(packed, shape))

    def _admit(self, seq: Sequence) -> None:
        """Send a newly placed sequence's state to its slot."""
        sample = self._samples[seq]
        request = sample.request
        assert seq.slot is not None
        self._runner.set_slot(
            self._packer.pack(
                slot=seq.slot,
                params=request.params,
                seed=request.seed,
                sample_index=sample.index,
                end_ids=request.end_ids,
                token_ids=seq.token_ids,
                num_prompt=seq.num_prompt,
                block_table=seq.block_table,
            )
        )
        if request.metrics.queue_time is None:
            request.metrics.queue_time = time.monotonic() - request.metrics.arrival_time
            request.metrics.num_cached_tokens = seq.num_cached

    def _score_prompts(self, plan: StepPlan, ticket: Ticket, shape: StepShape) -> jax.Array | None:
        targets = np.zeros(shape.chunk, np.int32)
        wanted = False
        for first, entry in chunk_rows(plan):
            sample = self._samples.get(entry.seq)
            if sample is not None and sample.scores_prompt:
                following = entry.seq.token_ids[entry.start + 1 : entry.start + entry.count + 1]
                targets[first : first + len(following)] = following
                wanted = True
        return self._runner.prompt_logprobs(ticket, targets, shape) if wanted else None


def chunk_rows(plan: StepPlan) -> list[tuple[int, ScheduledTokens]]:
    """Each prefilling entry with its first chunk row, in the order `pack_batch` packs them."""
    rows, first = [], 0
    for entry in plan.entries:
        if not entry.is_decode:
            rows.append((first, entry))
            first += entry.count
    return rows

"""From the scheduler's plans to programs on the device, and to their reports.

Packs, starts and reads; knows slots, shapes and the two forms of a step.  Does not know what the
tokens mean: `jaxserve.recorder` does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import jax
import numpy as np

from jaxserve.batch import BatchLayout, pack_batch
from jaxserve.carry import SlotPacker
from jaxserve.constraints import NOTHING, Constraints, Ended
from jaxserve.flight import Flight, Landed
from jaxserve.masked_steps import PlainSteps, masked_steps
from jaxserve.request import Sample
from jaxserve.runner import Runner, Ticket
from jaxserve.shapes import StepShape
from jaxserve.stats import WAIT, StepMeter, Stopwatch
from scheduler import ScheduledTokens, Sequence, StepPlan


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
        self._plain = PlainSteps(runner)
        self._masked = masked_steps(runner, constraints)
        self._stopwatch = Stopwatch()

    def copy_pages(self, plan: StepPlan) -> None:
        """Move preempted sequences' pages; a plan that computes nothing may ask for that too."""
        for copy in plan.swapped_out:
            self._runner.swap_out(copy)
        for copy in plan.swapped_in:
            self._runner.swap_in(copy)

    def launch(self, plan: StepPlan) -> Flight:
        """Start a plan, or what can be started of it while its masks are not known."""
        for seq in plan.admitted:
            self._admit(seq)
        self._meter.mark("admit")
        way = self._masked if self._constraints.limit(plan) else self._plain
        shape = way.choose(len(plan.entries), plan.num_chunk_tokens)
        flight = Flight(plan, shape, pack_batch(plan, self._layouts[shape]))
        self._meter.mark("pack")
        way.begin(flight)
        self._stopwatch.start()
        if flight.ticket is not None:
            self._score(flight)
        self._meter.mark("dispatch")
        return flight

    def complete(self, flight: Flight) -> Ended:
        """Start what is left of a flight, if anything; what its masks have ended.

        What the flights before it have sampled must be recorded.
        """
        if flight.ticket is not None:
            return NOTHING
        masks = self._constraints.masks(flight.plan)
        self._meter.mark("masks")
        self._masked.finish(flight, masks.words)
        self._score(flight)
        self._meter.mark("dispatch")
        return masks.ended

    def read(self, flight: Flight) -> Landed:
        """Wait for a flight's results."""
        assert flight.ticket is not None
        report = self._runner.read(flight.ticket)
        seconds = self._stopwatch.stop()
        prompts = None
        if flight.prompt_report is not None:
            prompts = self._runner.read_prompt_logprobs(flight.prompt_report)
        self._meter.mark(WAIT)
        return Landed(flight, report, prompts, self._constraints.settle(flight.question), seconds)

    def _score(self, flight: Flight) -> None:
        assert flight.ticket is not None
        flight.prompt_report = self._score_prompts(flight.plan, flight.ticket, flight.shape)

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

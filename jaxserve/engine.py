"""The engine: continuous batching over fixed shapes, one step at a time.

`step` is schedule, run, update.  With asynchronous scheduling the host trails the device by one
step: it dispatches step n + 1, whose tokens the device feeds back to itself, before it reads the
tokens of step n.  Features are functions of the plan or data on the device, not branches here.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.batch import pack_batch
from jaxserve.carry import SlotPacker
from jaxserve.compilations import CompileCounter
from jaxserve.detokenizer import Detokenizer
from jaxserve.models.llama import Params
from jaxserve.observer import Observer, StepRecord
from jaxserve.outputs import Delta, RequestMetrics, RequestOutput
from jaxserve.report import StepOutput
from jaxserve.request import Request, Sample, delta, finish_sample, logprob_entry
from jaxserve.runner import Runner, Ticket
from jaxserve.sampling_params import SamplingParams
from jaxserve.shapes import StepShape
from jaxserve.stats import WAIT, EngineStats, StepMeter, Stopwatch
from jaxserve.stop_strings import StopStrings
from jaxserve.tokenizer import Tokenizer
from scheduler import FinishReason, ScheduledTokens, Scheduler, Sequence, StepPlan
from scheduler.step_time import FittedCost, StepWork
from scheduler.summary import Bounds

LONGEST_REST_S = 0.005
"""Longest sleep of one turn of the loop, so that its caller can submit or abort in between."""
_GOOD = (FinishReason.STOP, FinishReason.LENGTH)
"""Reasons of an end that a latency bound can be met with."""
NOT_FINITE = "the model's logits were not finite (NaN or infinity); this request was ended"


class _Flight(NamedTuple):
    """A dispatched step whose results the host has not read yet."""

    plan: StepPlan
    shape: StepShape
    ticket: Ticket
    prompt_report: jax.Array | None
    """Prompt log-probabilities of the step's chunk rows, if a sequence in it wants them."""


class Engine:
    """Runs requests to their end; `jaxserve.startup` builds one from a configuration."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        end_ids: frozenset[int],
        seed: int,
        asynchronous: bool,
        step_cost: FittedCost | None = None,
        targets: Bounds | None = None,
    ) -> None:
        """Take over a ready runner.

        Args:
            runner: the device side.
            scheduler: an empty scheduler of the same sizes.
            tokenizer: for text out; text in is the caller's business.
            end_ids: tokens that end a sequence unless it ignores them.
            seed: where requests without a seed draw theirs from.
            asynchronous: dispatch a step before the results of the one before are read.
            step_cost: learns how long the dispatches take, if there.
            targets: bounds that a request must meet to be counted as good.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self._random = random.Random(seed)
        self._depth = 1 if asynchronous else 0
        self._packer = SlotPacker(runner.spec.sizes)
        self._layouts = {shape: runner.spec.batch_layout(shape) for shape in runner.shapes.all()}
        self._flights: deque[_Flight] = deque()
        self._requests: dict[str, Request] = {}
        self._samples: dict[Sequence, Sample] = {}
        self._fresh_ids = (f"request-{n}" for n in itertools.count(1))
        self.step_cost = step_cost
        self.observer = Observer()
        """Whoever counts; see `jaxserve.observer`."""
        self._targets = targets
        self._stopwatch = Stopwatch()
        self._meter = StepMeter(runner.spec.sizes.num_slots)
        self._base = replace(scheduler.stats)
        self.compilations = CompileCounter()

    @property
    def has_work(self) -> bool:
        """Something is waiting, running or in flight."""
        return self.scheduler.has_work or bool(self._flights)

    def submit(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        priority: int = 0,
        key: str = "",
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt_token_ids: at least one.
            params: how to sample, and when to end.
            request_id: its name from now on; a fresh one if absent.
            prompt: the text, to be given back with the output.
            priority: lower first, under the policy "priority".
            key: whose it is, such as a user or tenant, for the fair share.

        Raises:
            ValueError: the prompt or a parameter is out of range, the request can never fit, or
                the id is in use.  Nothing has changed then.
        """
        request_id = self._fresh_id(request_id)
        ids = self._checked_prompt(prompt_token_ids)
        end_ids = frozenset(params.stop_token_ids or ())
        end_ids |= frozenset() if params.ignore_eos else self.end_ids
        spec = self.runner.spec
        params.check_against(spec.model.vocab_size, spec.num_top, end_ids)
        request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=ids,
            params=params,
            seed=params.seed if params.seed is not None else self._random.getrandbits(64),
            end_ids=end_ids,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(ids),
        )
        for index in range(params.n):
            self._add_sample(request, index, priority, key)
        self._requests[request_id] = request
        self._meter.prompt_tokens += len(ids)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request now, with reason "abort"; what it has can still be taken."""
        for sample in self._known(request_id).samples:
            if sample.finish_reason is None:
                self._finish(sample, FinishReason.ABORT)

    def step(self) -> list[Delta]:
        """Advance the engine by one step and return what became known."""
        self._meter.begin()
        plan = self.scheduler.schedule()
        self._meter.mark("schedule")
        self._copy_pages(plan)
        if plan:
            self._flights.append(self._run(plan))
        elif not self._flights:
            self._rest()
        return self._update(keep=self._depth if plan else 0)

    def output(self, request_id: str) -> RequestOutput:
        """A request's state so far."""
        return self._known(request_id).output()

    def is_finished(self, request_id: str) -> bool:
        """All samples of a request have ended, so that it can be taken."""
        return self._known(request_id).finished

    def take(self, request_id: str) -> RequestOutput:
        """The result of a finished request, which the engine then forgets.

        Raises:
            ValueError: the request is unknown or still running.
        """
        request = self._known(request_id)
        if not request.finished:
            raise ValueError(f"request {request_id!r} is still running; abort it or step on")
        del self._requests[request_id]
        return request.output()

    def update_weights(self, params: Params) -> None:
        """Serve other weights from now on, with the same executables.

        Raises:
            ValueError: the tree does not match, or requests are running on the old weights.
        """
        if self.scheduler.has_work:  # a step in flight may remain: nobody waits for its results
            raise ValueError("weights can be replaced only while no request is running")
        self.runner.replace_params(params)
        self.scheduler.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Counts and times since the last reset."""
        meter, base = self._meter, self._base
        now = self.scheduler.stats
        steps = meter.steps
        return EngineStats(
            steps=steps,
            dispatches=meter.dispatches,
            prompt_tokens=meter.prompt_tokens,
            output_tokens=meter.output_tokens,
            slot_utilisation=meter.slot_utilisation,
            padded_share=meter.padded_share,
            discarded_tokens=now.discarded_tokens - base.discarded_tokens,
            preemptions=now.num_preemptions - base.num_preemptions,
            swaps=now.num_swaps - base.num_swaps,
            prefix_query_tokens=now.prefix_query_tokens - base.prefix_query_tokens,
            prefix_hit_tokens=now.prefix_hit_tokens - base.prefix_hit_tokens,
            compilations_after_ready=self.compilations.count,
            host_s_per_step=meter.host_s / steps if steps else None,
            host_s_by_phase=meter.host_s_by_phase,
            step_s=meter.busy_s / steps if steps else None,
            steps_by_shape=dict(meter.by_shape),
            num_in_bounds=None if self._targets is None else meter.num_in_bounds,
            elapsed_s=meter.elapsed_s,
        )

    def reset_stats(self) -> None:
        """Start counting anew; compile events are always counted from ready."""
        self._meter = StepMeter(self._meter.num_slots)
        self._base = replace(self.scheduler.stats)

    def check(self) -> None:
        """Assert the invariants of scheduler and engine."""
        self.scheduler.check()
        if not self.has_work:
            assert not self._samples, f"{len(self._samples)} sequences left while idle"

    def describe(self) -> dict[str, Any]:
        """What was allocated and compiled, as plain data."""
        spec, shapes = self.runner.spec, self.runner.shapes
        pages, longest = self.scheduler.pool.num_pages - 1, self.scheduler.config.max_model_len
        return {
            "dtype": str(self.runner.dtype),
            "weights": self.runner.weight_layout,
            "kv_cache_dtype": str(spec.layout.cell_dtype),
            "page_size": spec.layout.page_size,
            "page_bytes": spec.layout.page_bytes * spec.model.num_layers,
            "num_pages": pages + 1,
            "kv_tokens": pages * spec.layout.page_size,
            "max_model_len": longest,
            "full_length_seqs": pages // -(-(longest - 1) // spec.layout.page_size),
            "max_num_seqs": self.scheduler.config.max_num_seqs,
            "token_budget": self.scheduler.config.token_budget,
            "attention": spec.attention,
            "shapes": [str(shape) for shape in shapes.all()],
            "devices": [str(device) for device in self.runner.mesh.devices.flat],
            **self.runner.memory(),
        }

    def _fresh_id(self, request_id: str | None) -> str:
        if request_id is None:
            return next(i for i in self._fresh_ids if i not in self._requests)
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use; choose another")
        return request_id

    def _checked_prompt(self, prompt_token_ids: Seq[int]) -> list[int]:
        ids = list(prompt_token_ids)
        if not ids:
            raise ValueError("the prompt is empty: it has no tokens and the model adds none")
        vocab = self.runner.spec.model.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                raise ValueError(f"prompt token {token!r} is not an integer")
            if not 0 <= token < vocab:
                raise ValueError(f"prompt token {token} is outside the vocabulary of {vocab}")
        return [int(token) for token in ids]

    def _add_sample(self, request: Request, index: int, priority: int, key: str) -> None:
        params = request.params
        limit = self.scheduler.config.max_model_len
        seq = Sequence(
            seq_id=f"{request.request_id}/{index}",
            token_ids=list(request.prompt_token_ids),
            max_tokens=limit if params.max_tokens is None else params.max_tokens,
            stop_ids=request.end_ids,
            min_tokens=params.min_tokens,
            priority=priority,
            key=key,
            reads_prefix_cache=params.prompt_logprobs is None or index > 0,
        )
        self.scheduler.add(seq)
        detokenizer = None
        if params.detokenize:
            detokenizer = Detokenizer(
                self.tokenizer, request.prompt_token_ids, params.skip_special_tokens
            )
        stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        sample = Sample(request, index, seq, detokenizer, stops)
        request.samples.append(sample)
        self._samples[seq] = sample

    def _known(self, request_id: str) -> Request:
        if request_id not in self._requests:
            raise ValueError(f"no request {request_id!r}: never submitted, or taken already")
        return self._requests[request_id]

    def _rest(self) -> None:
        """Nothing runs: let some of the time pass for which a batch is collected, if one is."""
        time.sleep(min(self.scheduler.wait_s, LONGEST_REST_S))
        self._meter.mark(WAIT)

    def _copy_pages(self, plan: StepPlan) -> None:
        """Move preempted sequences' pages; a plan that computes nothing may ask for that too."""
        for copy in plan.swapped_out:
            self.runner.swap_out(copy)
        for copy in plan.swapped_in:
            self.runner.swap_in(copy)

    def _run(self, plan: StepPlan) -> _Flight:
        for seq in plan.admitted:
            self._admit(seq)
        self._meter.mark("admit")
        shape = self.runner.shapes.choose(len(plan.entries), plan.num_chunk_tokens)
        packed = pack_batch(plan, self._layouts[shape])
        self._meter.mark("pack")
        ticket = self.runner.run(packed, shape)
        self._stopwatch.start()
        prompt_report = self._score_prompts(plan, ticket, shape)
        self._meter.mark("dispatch")
        return _Flight(plan, shape, ticket, prompt_report)

    def _admit(self, seq: Sequence) -> None:
        """Send a newly placed sequence's state to its slot."""
        sample = self._samples[seq]
        request = sample.request
        assert seq.slot is not None
        self.runner.set_slot(
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
        for first, entry in _chunk_rows(plan):
            if self._scores_prompt(entry.seq):
                following = entry.seq.token_ids[entry.start + 1 : entry.start + entry.count + 1]
                targets[first : first + len(following)] = following
                wanted = True
        return self.runner.prompt_logprobs(ticket, targets, shape) if wanted else None

    def _scores_prompt(self, seq: Sequence) -> bool:
        sample = self._samples.get(seq)
        return (
            sample is not None
            and sample.index == 0
            and sample.request.params.prompt_logprobs is not None
        )

    def _update(self, keep: int) -> list[Delta]:
        """Read all but the newest `keep` dispatches; text is made while those run."""
        deltas: list[Delta] = []
        while len(self._flights) > keep:
            flight = self._flights.popleft()
            report = self.runner.read(flight.ticket)
            seconds = self._stopwatch.stop()
            prompts = self._read_prompts(flight)
            self._meter.mark(WAIT)
            if prompts is not None:
                deltas += self._record_prompts(flight.plan, prompts)
            deltas += self._record(flight, report, seconds)
            self._meter.mark("output")
        return deltas

    def _record(self, flight: _Flight, report: StepOutput, seconds: float) -> list[Delta]:
        plan = flight.plan
        num_steps, tokens, failed = report.rows(len(plan.entries))
        if self.step_cost is not None and num_steps > 0 and seconds > 0:
            work = replace(StepWork.of(plan), num_steps=num_steps)
            self.step_cost.record(work, seconds)
        update = self.scheduler.update(plan, tokens, failed)
        self._meter.mark("update")
        self._meter.count(plan, flight.shape, num_steps, tokens)
        self.observer.on_step(
            StepRecord(
                shape=str(flight.shape),
                num_steps=num_steps,
                device_s=seconds,
                host_s=self._meter.turn_host_s,
                num_chunk_tokens=plan.num_chunk_tokens,
                num_sampled=sum(map(len, tokens)),
                num_rows=num_steps * flight.shape.tokens,
                num_running=self.scheduler.num_running,
                num_waiting=self.scheduler.num_waiting,
            )
        )
        now = time.monotonic()
        deltas = []
        for row, count in update.accepted:
            sample = self._samples[plan.entries[row].seq]
            deltas.append(self._take_tokens(sample, report, row, tokens[row][:count], now))
        for seq in update.finished:
            left = self._samples.get(seq)
            if left is not None:  # not ended with its last token above
                deltas.append(self._end_without_token(left))
        return deltas

    def _take_tokens(
        self, sample: Sample, report: StepOutput, row: int, tokens: Seq[int], now: float
    ) -> Delta:
        """Give a sample the tokens of a dispatch, up to one that completes a stop string."""
        seq, params = sample.seq, sample.request.params
        text, num_taken = "", 0
        for step, token in enumerate(tokens):
            if params.logprobs is not None:
                entry = logprob_entry(report, (step, row), params.logprobs, self.tokenizer)
                sample.logprobs.append(entry)
                sample.cumulative_logprob += entry[token].logprob
            num_taken += 1
            is_last = num_taken == len(tokens)
            text += sample.push(token, ends=is_last and seq.stop_token is not None)
            if sample.stops.matched is not None:
                self.scheduler.cut(seq, len(tokens) - num_taken)
                break
        self._meter.output_tokens += num_taken
        self.observer.on_tokens(*sample.request.stamp_tokens(sample, num_taken, now))
        if seq.finish_reason is not None:
            text += self._close(sample, seq.finish_reason)
        return delta(sample, text, tuple(tokens[:num_taken]))

    def _end_without_token(self, sample: Sample) -> Delta:
        reason = sample.seq.finish_reason
        assert reason is not None
        return delta(sample, self._close(sample, reason), ())

    def _finish(self, sample: Sample, reason: FinishReason) -> Delta:
        self.scheduler.finish(sample.seq, reason)
        return delta(sample, self._close(sample, reason), ())

    def _close(self, sample: Sample, reason: FinishReason) -> str:
        text = finish_sample(sample, reason)
        if sample.finish_reason == FinishReason.ERROR.value:
            sample.request.error = NOT_FINITE
        if sample.finish_reason == FinishReason.STOP.value and sample.stop_reason is None:
            token = sample.seq.stop_token
            sample.stop_reason = None if token in self.end_ids else token
        del self._samples[sample.seq]
        if sample.request.finished:
            sample.request.stamp_end(time.monotonic())
            self.observer.on_end(sample.request.output())
            if self._targets is not None and reason in _GOOD:
                metrics = sample.request.metrics
                self._meter.num_in_bounds += self._targets.hold(metrics.ttft, metrics.tpot)
        return text

    def _read_prompts(self, flight: _Flight) -> StepOutput | None:
        if flight.prompt_report is None:
            return None
        return self.runner.read_prompt_logprobs(flight.prompt_report)

    def _record_prompts(self, plan: StepPlan, report: StepOutput) -> list[Delta]:
        """Store a step's prompt log-probabilities; end the requests whose are not finite."""
        deltas = []
        for first, entry in _chunk_rows(plan):
            if self._scores_prompt(entry.seq):
                request = self._samples[entry.seq].request
                if not self._record_prompt(request, report, first, entry):
                    left = [s for s in request.samples if s.finish_reason is None]
                    deltas += [self._finish(sample, FinishReason.ERROR) for sample in left]
        return deltas

    def _record_prompt(
        self, request: Request, report: StepOutput, first: int, entry: ScheduledTokens
    ) -> bool:
        """Store what one entry of a step says; False if a row of it is not finite."""
        scores, num_top = request.prompt_logprobs, request.params.prompt_logprobs
        assert scores is not None
        assert num_top is not None
        end = min(entry.start + entry.count, entry.seq.num_prompt - 1)
        rows = range(first, first + max(end - entry.start, 0))
        for position, row in enumerate(rows, entry.start + 1):
            scores[position] = logprob_entry(report, row, num_top, self.tokenizer)
        return bool(report.finite[rows].all())


def _chunk_rows(plan: StepPlan) -> list[tuple[int, ScheduledTokens]]:
    """Each prefilling entry with its first chunk row, in the order `pack_batch` packs them."""
    rows, first = [], 0
    for entry in plan.entries:
        if not entry.is_decode:
            rows.append((first, entry))
            first += entry.count
    return rows

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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.compilations import CompileCounter
from jaxserve.constraints import Constraints
from jaxserve.detokenizer import Detokenizer
from jaxserve.dispatch import Dispatcher
from jaxserve.flight import Flight, Landed
from jaxserve.grammar import Grammars
from jaxserve.masked_steps import OFF, SPLIT
from jaxserve.models.llama import Params
from jaxserve.observer import Observer, StepRecord
from jaxserve.outputs import Delta, RequestMetrics, RequestOutput
from jaxserve.recorder import NOT_FINITE, Recorder
from jaxserve.request import Request, Sample
from jaxserve.runner import Runner
from jaxserve.sampling_params import SamplingParams
from jaxserve.stats import WAIT, EngineStats, StepMeter
from jaxserve.stop_strings import StopStrings
from jaxserve.structured import StructuredOutputsParams
from jaxserve.tokenizer import Tokenizer
from scheduler import FinishReason, Scheduler, Sequence, StepPlan, Update
from scheduler.step_time import FittedCost, StepWork
from scheduler.summary import Bounds

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["NOT_FINITE", "Engine"]

LONGEST_REST_S = 0.005
"""Longest sleep of one turn of the loop, so that its caller can submit or abort in between."""


class _Landing(NamedTuple):
    """A dispatch that was read, and what the scheduler made of it."""

    landed: Landed
    num_steps: int
    tokens: list[list[int]]
    update: Update
    deltas: list[Delta]
    """What its prompt log-probabilities have ended."""


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
        self._flights: deque[Flight] = deque()
        self._requests: dict[str, Request] = {}
        self._fresh_ids = (f"request-{n}" for n in itertools.count(1))
        self.step_cost = step_cost
        self._targets = targets
        self._meter = StepMeter(runner.spec.sizes.num_slots)
        self.grammars = Grammars(tokenizer, runner.spec.model.vocab_size, end_ids)
        """Constraints on text, compiled; may be used from any thread."""
        sizes, rows = runner.spec.sizes, runner.shapes.max_rows
        constraints = Constraints(self.grammars, sizes.num_slots, rows, sizes.allowed_words)
        self._constraints = constraints
        self._recorder = Recorder(scheduler, tokenizer, constraints, self._meter, end_ids, targets)
        self._samples = self._recorder.samples
        self._dispatcher = Dispatcher(runner, self._samples, constraints, self._meter)
        self._base = replace(scheduler.stats)
        self.compilations = CompileCounter()

    @property
    def observer(self) -> Observer:
        """Whoever counts; see `jaxserve.observer`."""
        return self._recorder.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self._recorder.observer = observer

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
        whole: bool = False,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt_token_ids: at least one.
            params: how to sample, and when to end.
            request_id: its name from now on; a fresh one if absent.
            prompt: the text, to be given back with the output.
            priority: lower first, under the policy "priority".
            key: whose it is, such as a user or tenant, for the fair share.
            whole: nobody looks at it before its end: of its samples, steps report the end only,
                and most of their text is made when it is asked for.

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
        grammar = self._grammar(params)
        request = Request(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=ids,
            params=params,
            seed=params.seed if params.seed is not None else self._random.getrandbits(64),
            end_ids=end_ids,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            whole=whole,
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(ids),
        )
        for index in range(params.n):
            self._add_sample(request, index, priority, key, grammar)
        self._requests[request_id] = request
        self._meter.prompt_tokens += len(ids)
        return request_id

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Delta]:
        """End a request now; what it has can still be taken.

        Args:
            request_id: of a request that was not taken.
            reason: of the samples that have not ended.  With "length" they get the text that was
                held back, as at any end by length.

        Returns:
            What that adds to them.
        """
        left = [s for s in self._known(request_id).samples if s.finish_reason is None]
        return [self._recorder.finish(sample, reason) for sample in left]

    def step(self) -> list[Delta]:
        """Advance the engine by one step and return what became known."""
        self._meter.begin()
        if len(self._flights) > self._depth:  # whoever waited for one was interrupted
            return self._go_on(self._flights[-1])
        plan = self.scheduler.schedule()
        self._meter.mark("schedule")
        self._dispatcher.copy_pages(plan)
        if not plan:
            if not self._flights:
                self._rest()
            return self._tell(self._land(keep=0))
        flight = self._dispatcher.launch(plan)
        self._flights.append(flight)
        return self._go_on(flight)

    def _go_on(self, flight: Flight) -> list[Delta]:
        """Read what the newest flight waits for, start the rest of it, and read what is due."""
        landing = self._land(keep=1)
        ended = self._dispatcher.complete(flight)
        deltas = self._tell(landing) + self._recorder.end_constrained(ended)
        return deltas + self._tell(self._land(keep=self._depth))

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
        self._meter.reset()
        self._base = replace(self.scheduler.stats)

    def check(self) -> None:
        """Assert the invariants of scheduler and engine."""
        self.scheduler.check()
        if not self.has_work:
            assert not self._samples, f"{len(self._samples)} sequences left while idle"
            self._constraints.check_idle()

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

    def _grammar(self, params: SamplingParams) -> LLMatcher | None:
        constraint = params.structured_outputs
        if constraint is None:
            return None
        if self.runner.masked_steps == OFF:
            raise ValueError(
                "structured_outputs need programs that this engine was started without; start it "
                "with masked_steps='auto'"
            )
        assert isinstance(constraint, StructuredOutputsParams)
        return self.grammars.compile(constraint)

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

    def _add_sample(
        self, request: Request, index: int, priority: int, key: str, grammar: LLMatcher | None
    ) -> None:
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
            text_may_end=params.structured_outputs is not None or bool(params.stop_strings),
            single_step=params.structured_outputs is not None and self.runner.masked_steps == SPLIT,
        )
        if grammar is not None:
            self._constraints.add(seq, params, grammar)
        self.scheduler.add(seq)
        detokenizer = None
        if params.detokenize:
            detokenizer = Detokenizer(
                self.tokenizer, request.prompt_token_ids, params.skip_special_tokens
            )
        stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        is_late = request.whole and not params.stop_strings
        sample = Sample(request, index, seq, detokenizer, stops, is_late=is_late)
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

    def _land(self, keep: int) -> _Landing | None:
        """Read the oldest dispatch if there are more than `keep`, and update the scheduler."""
        if len(self._flights) <= keep:
            return None
        landed = self._dispatcher.read(self._flights[0])
        self._flights.popleft()  # now: whoever interrupts the wait can go on
        assert len(self._flights) <= keep, "two dispatches land at once"
        plan = landed.flight.plan
        deltas = self._recorder.record_prompts(landed)
        num_steps, tokens, failed = landed.report.rows(len(plan.entries))
        self._learn(plan, num_steps, landed.seconds)
        complete, broken = landed.ended.rows(plan)
        update = self.scheduler.update(plan, tokens, {*failed, *broken}, complete)
        self._meter.mark("update")
        return _Landing(landed, num_steps, tokens, update, deltas)

    def _tell(self, landing: _Landing | None) -> list[Delta]:
        """What a dispatch that was read means for the requests; text is made while others run."""
        if landing is None:
            return []
        landed, num_steps, tokens, update, deltas = landing
        flight = landed.flight
        self._meter.count(flight.plan, flight.shape, num_steps, tokens)
        self.observer.on_step(self._step_record(flight, num_steps, tokens, landed.seconds))
        deltas = deltas + self._recorder.record_tokens(landed, tokens, update)
        self._meter.mark("output")
        return deltas

    def _learn(self, plan: StepPlan, num_steps: int, seconds: float) -> None:
        """Teach the model of step times what a dispatch took."""
        if self.step_cost is not None and num_steps > 0 and seconds > 0:
            self.step_cost.record(replace(StepWork.of(plan), num_steps=num_steps), seconds)

    def _step_record(
        self, flight: Flight, num_steps: int, tokens: Seq[Seq[int]], seconds: float
    ) -> StepRecord:
        return StepRecord(
            shape=str(flight.shape),
            num_steps=num_steps,
            device_s=seconds,
            host_s=self._meter.turn_host_s,
            num_chunk_tokens=flight.plan.num_chunk_tokens,
            num_sampled=sum(map(len, tokens)),
            num_rows=num_steps * flight.shape.tokens,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
        )

"""A scheduler on a fake device, with every rule of a plan asserted at every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from scheduler import (
    AdmissionPolicy,
    BlockPool,
    FinishReason,
    Scheduler,
    SchedulerConfig,
    Sequence,
    Status,
    StepPlan,
    SwapSpace,
    Update,
)
from scheduler.step_time import StepCost
from tests.scheduler.device import FakeDevice, Request, Results


def make_config(**limits: Any) -> SchedulerConfig:
    """Limits that no test meets unless it sets them."""
    values: dict[str, Any] = {
        "max_num_seqs": 4,
        "token_budget": 64,
        "max_prefill_tokens": 64,
        "max_model_len": 64,
    }
    return SchedulerConfig(**(values | limits))


class Harness:
    """Drives a scheduler as an engine does: synchronously, or with plans in flight."""

    def __init__(
        self,
        *,
        num_pages: int = 65,
        page_size: int = 4,
        admission: AdmissionPolicy | None = None,
        num_host_pages: int = 0,
        clock: Callable[[], float] | None = None,
        cost: StepCost | None = None,
        **limits: Any,
    ) -> None:
        pool = BlockPool(num_pages, page_size)
        space = SwapSpace(num_host_pages)
        config = make_config(**limits)
        self.scheduler = Scheduler(config, pool, admission, space, clock=clock, cost=cost)
        self.device = FakeDevice(page_size)
        self.in_flight: deque[tuple[StepPlan, Results]] = deque()
        self.requests: list[Request] = []

    def add(
        self,
        prompt: list[int] | int,
        max_tokens: int = 4,
        *,
        seed: int | None = None,
        breaks_at: int | None = None,
        stops_after: int | None = None,
        completes_after: int | None = None,
        ends_on_device: bool = True,
        **options: Any,
    ) -> Request:
        """Add a request; a prompt may be given by its length, and is then shared with no other."""
        number = len(self.requests)
        if isinstance(prompt, int):
            prompt = [1000 * (number + 1) + position for position in range(prompt)]
        seq = Sequence(f"seq-{number}", list(prompt), max_tokens, **options)
        seed = number if seed is None else seed
        request = Request(seq, seed, breaks_at, stops_after, completes_after, ends_on_device)
        self.scheduler.add(seq)
        self.requests.append(request)
        self.device.requests[seq.seq_id] = request
        return request

    def dispatch(self) -> StepPlan:
        """Schedule a step and start it."""
        running = list(self.scheduler.running)
        in_decode = [seq for seq in running if seq.in_decode]
        is_complete = [seq.num_computed == seq.max_computed for seq in running]
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self._check_budget(plan)
        self._check_steps(plan)
        self._check_preemption(plan, running)
        self._check_progress(plan, running, in_decode, is_complete)
        self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def collect(self) -> Update:
        """Update with the results of the oldest step in flight, and look for stop strings."""
        plan, results = self.in_flight.popleft()
        update = self.scheduler.update(plan, *results)
        self.scheduler.check()
        for index, count in update.accepted:
            assert plan.entries[index].samples
            seq = plan.entries[index].seq
            stops_after = self.device.requests[seq.seq_id].stops_after
            if stops_after is not None and 0 <= seq.num_output - stops_after < count:
                self.scheduler.cut(seq, seq.num_output - stops_after)
        for seq in update.finished:
            assert seq.status is Status.FINISHED
        self.scheduler.check()
        return update

    def change_weights(self) -> None:
        """Load other weights, which makes the content of all pages stale."""
        self.device.version += 1
        self.scheduler.reset_prefix_cache()
        self.scheduler.check()

    def step(self) -> StepPlan:
        """Run one step with none in flight, before or after."""
        while self.in_flight:
            self.collect()
        plan = self.dispatch()
        self.collect()
        return plan

    def async_step(self) -> StepPlan:
        """Schedule a step while the one before it runs."""
        while len(self.in_flight) > 1:
            self.collect()
        return self.dispatch()

    def drain(self, *, asynchronous: bool = False) -> None:
        """Run until nothing is left, in a bounded number of steps, and check every output."""
        # A step computes at least one token of the most senior, and all of them again when a
        # still more senior one takes their pages.  Without mixed steps it may wait for the
        # prefill of another first.
        unfinished = [r.seq for r in self.requests if r.seq.finish_reason is None]
        tokens = sum(seq.max_computed + 2 for seq in unfinished)
        config = self.scheduler.config
        num_rounds = 1 if config.mixed else 1 + config.max_model_len
        for _ in range(4 + 2 * len(unfinished) * tokens * num_rounds):
            if not self.scheduler.has_work:
                break
            if asynchronous:
                self.async_step()
            else:
                self.step()
        while self.in_flight:
            self.collect()
        assert not self.scheduler.has_work, "sequences starve"
        assert self.scheduler.pool.num_held == 0
        for request in self.requests:
            self.check_output(request)

    def check_output(self, request: Request) -> None:
        """What a request got is what it gets alone, or the beginning of it if it was aborted."""
        seq = request.seq
        output, reason, stop_token = request.solo()
        if seq.finish_reason is FinishReason.ABORT:
            assert seq.output_ids == output[: seq.num_output]
            return
        assert (seq.output_ids, seq.finish_reason, seq.stop_token) == (output, reason, stop_token)

    def _check_budget(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        num_decodes = sum(entry.is_decode for entry in plan.entries)
        assert num_decodes + plan.num_chunk_tokens <= config.token_budget
        assert plan.num_chunk_tokens <= config.max_prefill_tokens
        assert len({entry.slot for entry in plan.entries}) == len(plan.entries)
        for entry in plan.entries:
            assert entry.count > 0
            assert entry.slot == entry.seq.slot
            assert entry.end == entry.seq.num_computed
            if not config.enable_chunked_prefill:
                assert entry.samples or entry.end == entry.seq.num_prompt

    def _check_steps(self, plan: StepPlan) -> None:
        """Several steps only where none could admit, and most rows take part in each."""
        assert 1 <= plan.num_steps <= self.scheduler.config.multi_step
        if plan.num_steps == 1:
            return
        assert not plan.num_chunk_tokens
        assert not plan.preempted
        for entry in plan.entries:
            left = entry.seq.max_computed - entry.start
            assert entry.count == min(plan.num_steps, left)
            if self.scheduler.waiting:
                assert entry.count == plan.num_steps
                assert not entry.seq.stop_ids
        if self.scheduler.waiting:
            assert len(plan.entries) == self.scheduler.config.max_num_seqs
        at_the_end = sum(entry.count == plan.num_steps for entry in plan.entries)
        assert 2 * at_the_end > len(plan.entries)

    def _check_preemption(self, plan: StepPlan, running: list[Sequence]) -> None:
        num_left = len(running) - len(plan.preempted)
        assert list(plan.preempted) == running[num_left:][::-1]
        if plan.preempted:
            assert not plan.admitted
        assert set(plan.admitted) <= {entry.seq for entry in plan.entries}
        assert set(plan.admitted).isdisjoint(running)

    def _check_progress(
        self,
        plan: StepPlan,
        running: list[Sequence],
        in_decode: list[Sequence],
        is_complete: list[bool],
    ) -> None:
        served = {entry.seq for entry in plan.entries}
        if not self.scheduler.config.mixed and plan.num_chunk_tokens:
            assert not plan.num_decode_tokens
            served |= set(in_decode)  # they wait for the prefills
        if running and not is_complete[0]:
            assert running[0] in served, "the most senior sequence stalls"
        assert set(in_decode) <= served | set(plan.preempted), "a decode stalls"
        for seq in plan.admitted:
            assert seq.num_cached < seq.num_prompt

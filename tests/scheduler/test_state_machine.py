"""Any history of adds, aborts, stops and steps, synchronous or not, gives every sequence its own
solo output (hypothesis finds the histories)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from scheduler import Continuous, FinishReason, Static
from scheduler.step_time import StepWork
from tests.scheduler.device import VOCAB_SIZE
from tests.scheduler.harness import Harness

MAX_MODEL_LEN = 24

tokens = st.integers(0, VOCAB_SIZE - 1)


def rarely(strategy: st.SearchStrategy[Any], otherwise: Any) -> st.SearchStrategy[Any]:
    """One time in four a value of `strategy`."""
    return st.integers(0, 3).flatmap(lambda n: strategy if n == 3 else st.just(otherwise))


class OneSecondPerRow:
    """A cost that makes any bound of a few seconds bite."""

    def seconds(self, work: StepWork) -> float:
        return float(work.num_steps * (work.rows + work.chunk_tokens))


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Tight limits: the pages hold one or two of the longest sequences, and the slots more."""
    page_size = draw(st.sampled_from([1, 2, 3, 4]))
    least = -(-(MAX_MODEL_LEN - 1) // page_size)
    max_num_seqs = draw(st.sampled_from([4, 3, 2, 1]))
    chunked = draw(st.booleans())
    token_budget = draw(st.integers(max_num_seqs, 12) if chunked else st.integers(24, 32))
    max_prefill = draw(st.integers(1, token_budget)) if chunked else token_budget
    policy = draw(st.sampled_from(["fcfs", "priority"]))
    by_priority = policy == "priority"
    return {
        "page_size": page_size,
        "num_pages": 1 + least + draw(st.integers(0, least)),
        "max_num_seqs": max_num_seqs,
        "token_budget": token_budget,
        "max_prefill_tokens": max_prefill,
        "max_model_len": MAX_MODEL_LEN,
        "policy": policy,
        "priority_ageing_s": draw(st.sampled_from([None, 1.0, 5.0])) if by_priority else None,
        "clock": itertools.count().__next__,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(rarely(st.just(False), True)),
        "multi_step": draw(st.sampled_from([1, 4, 2, 7])),
        "preemption": draw(st.sampled_from(["swap", "recompute", "auto"])),
        "page_cost_tokens": draw(st.sampled_from([0.0, 0.5, 2.0])),
        "num_host_pages": draw(st.sampled_from([64, 6, 2, 0])),
        "admission": draw(rarely(st.just(Static), Continuous))(),
        "mixed": draw(rarely(st.just(False), True)),
        "fair_share": draw(st.booleans()),
        "target_tpot_s": draw(rarely(st.sampled_from([2.0, 5.0]), None)),
        "target_ttft_s": draw(rarely(st.just(30.0), None)),
        "cost": OneSecondPerRow(),
    }


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a request; most run long enough to get in each other's way."""
    return {
        "prompt": draw(st.lists(tokens, min_size=1, max_size=10)),
        "parent": draw(st.none() | st.integers(0, 9)),
        "max_tokens": draw(st.sampled_from([16, 12, 8, 24, 2, 1, 0])),
        "stop_ids": draw(rarely(st.frozensets(tokens, max_size=1), frozenset())),
        "min_tokens": draw(rarely(st.integers(1, 6), 0)),
        "priority": draw(st.integers(-1, 1)),
        "key": draw(st.sampled_from("abc")),
        "seed": draw(st.integers(0, 2)),
        "cache_salt": draw(rarely(st.just(b"salt"), b"")),
        "reads_prefix_cache": draw(rarely(st.just(False), True)),
        "breaks_at": draw(rarely(st.integers(0, 20), None)),
        "stops_after": draw(rarely(st.integers(1, 12), None)),
        "completes_after": draw(rarely(st.integers(1, 12), None)),
        "ends_on_device": draw(rarely(st.just(False), True)),
    }


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule is something that an engine or its callers can do between two other calls."""

    @initialize(limits=limits(), first=st.lists(requests(), min_size=3, max_size=6))
    def start(self, limits: dict[str, Any], first: list[dict[str, Any]]) -> None:
        self.harness = Harness(**limits)
        self.add(first)

    @rule(options=st.lists(requests(), min_size=1, max_size=3))
    def add(self, options: list[dict[str, Any]]) -> None:
        for request in options:
            self._add(**request)

    def _add(
        self,
        prompt: list[int],
        parent: int | None,
        breaks_at: int | None,
        reads_prefix_cache: bool,
        **options: Any,
    ) -> None:
        """Add a request, perhaps with the tokens of an earlier one at the start of its prompt."""
        if parent is not None and self.harness.requests:
            before = self.harness.requests[parent % len(self.harness.requests)]
            prompt = (before.seq.token_ids + prompt)[: MAX_MODEL_LEN - 1]
        # What another sequence has computed would not break again.
        breaks_in_prompt = breaks_at is not None and breaks_at < len(prompt)
        self.harness.add(
            prompt,
            breaks_at=breaks_at,
            reads_prefix_cache=reads_prefix_cache and not breaks_in_prompt,
            **options,
        )

    @precondition(lambda self: self.harness.requests)
    @rule(index=st.integers(0, 99))
    def abort(self, index: int) -> None:
        """Whatever its state, and without effect if it has finished."""
        seq = self.harness.requests[index % len(self.harness.requests)].seq
        before = seq.finish_reason
        self.harness.scheduler.abort(seq)
        assert seq.finish_reason is (before or FinishReason.ABORT)

    @rule()
    def change_weights(self) -> None:
        self.harness.change_weights()

    @precondition(lambda self: len(self.harness.in_flight) <= 1)
    @rule()
    def dispatch(self) -> None:
        self.harness.dispatch()

    @precondition(lambda self: self.harness.in_flight)
    @rule()
    def collect(self) -> None:
        self.harness.collect()

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule(count=st.integers(1, 8))
    def async_steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.async_step()

    @invariant()
    def pages_and_slots_are_owned_once(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain(asynchronous=len(self.harness.in_flight) > 0)


SETTINGS = settings(max_examples=150, stateful_step_count=20, deadline=None, derandomize=True)


def test_every_history_ends_in_the_solo_outputs() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)


@pytest.mark.slow
def test_every_one_of_many_more_histories_ends_in_the_solo_outputs() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=settings(SETTINGS, max_examples=3000))

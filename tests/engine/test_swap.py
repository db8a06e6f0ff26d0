"""Preempted sequences that come back from host memory say what they would have said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.swap import HostPages, groups
from pallas_kernels import KVPages
from scheduler import PageCopy
from tests.engine.mini import Mini, greedy, logprobs, prompts, run, solo, tokens

PAGES = 20
"""A pool for one of the longest sequences below, where eight run at once."""


def asked(count: int = 90) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded requests of many lengths, some with penalties."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(5, 60, count).tolist()
    params = [
        greedy(60),
        SamplingParams(temperature=0.9, seed=7, max_tokens=50, ignore_eos=True),
        greedy(70, repetition_penalty=1.3, frequency_penalty=0.5),
    ]
    return [(p, replace(params[i % 3])) for i, p in enumerate(prompts(lengths, seed=4))]


@pytest.mark.parametrize("multi_step", [1, 8])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_swap_and_recompute_say_the_same(mini: Mini, asynchronous: bool, multi_step: int) -> None:
    """Over 100 preemptions each; the space is too small at times, and nothing is lost."""
    want: list[RequestOutput] = solo(mini.engine(), asked())
    before = mini.engine().compilations.count
    for preemption, host_pages in [("recompute", 0), ("swap", None), ("swap", 12), ("auto", None)]:
        engine = mini.engine(
            pages=PAGES,
            asynchronous=asynchronous,
            multi_step=multi_step,
            preemption=preemption,
            host_pages=host_pages,
            page_cost_tokens=7.0,
            enable_prefix_caching=False,
        )
        got = run(engine, asked())
        assert tokens(got) == tokens(want), preemption
        stats = engine.scheduler.stats
        assert stats.num_preemptions >= 100, stats
        if preemption == "recompute":
            assert stats.num_swaps == 0
        elif host_pages is None and preemption == "swap":
            assert stats.num_swaps == stats.num_preemptions
        else:
            assert 0 < stats.num_swaps < stats.num_preemptions
    assert mini.engine().compilations.count == before


def test_not_a_bit_of_a_page_is_lost(mini: Mini) -> None:
    """What is restored is what was computed: log-probabilities are those of an endless pool."""
    ask = [(prompt, greedy(60, logprobs=0)) for prompt in prompts([40] * 6, seed=8)]
    plain = run(mini.engine(), ask)
    engine = mini.engine(pages=PAGES, preemption="swap")
    crowded = run(engine, ask)
    assert engine.scheduler.stats.num_swaps > 0
    for got, want in zip(crowded, plain, strict=True):
        assert logprobs(got) == pytest.approx(logprobs(want), abs=1e-5)


def test_pages_travel_in_groups_of_one_size() -> None:
    copy = PageCopy((5, 9, 2, 7, 4), (0, 1, 2, 3, 4))
    sent = list(groups(copy, 2))
    assert [group.numbers.tolist() for group in sent] == [[5, 9], [2, 7], [4, -1]]
    assert [group.host_pages for group in sent] == [(0, 1), (2, 3), (4,)]


def test_host_pages_give_back_what_they_received() -> None:
    content = (KVPages(jnp.arange(12, dtype=jnp.float32).reshape(3, 4)),)
    memory = HostPages(8, content)
    memory.receive(content, (6, 1), dispatch=3)
    memory.settle(2)
    memory.settle(3)
    (pages,) = memory.content((1, 6), 3)
    assert pages.cells[:2].tolist() == [[4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0]]


def test_a_space_too_small_for_a_page_is_refused(executables: Path) -> None:
    with pytest.raises(ValueError, match=r"swap_space_gib=1e-06 does not hold one page of 4096"):
        Mini.build(executables, preemption="swap", swap_space_gib=1e-6)
    with pytest.raises(ValueError, match="swap_space_gib=0 must be above 0"):
        EngineConfig(swap_space_gib=0)

"""The demo model in bfloat16 on a ragged workload: exact counts, and batching changes nothing."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.drive import run_all
from jaxserve.engine import Engine
from jaxserve.outputs import RequestOutput
from jaxserve.policies import make_scheduler
from tests.smollm2.para import MEAN_NLL, PARA

REQUESTS = json.loads((Path(__file__).parent / "workload.json").read_text())
IDEAL_STEPS = 505
"""Decode steps of 16 slots with instant admission: the longest slot of a greedy packing."""


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def together(bf16: LLM) -> list[RequestOutput]:
    """All 64 requests at once on 16 slots."""
    bf16.engine.reset_stats()
    return bf16.generate(
        [{"prompt_token_ids": r["prompt_token_ids"]} for r in REQUESTS],
        [_params(r["max_tokens"]) for r in REQUESTS],
    )


def test_exact_counts(bf16: LLM, together: list[RequestOutput]) -> None:
    lengths = [len(output.outputs[0].token_ids) for output in together]
    assert lengths == [r["max_tokens"] for r in REQUESTS]
    assert sum(lengths) == 5936
    stats = bf16.engine.stats()
    assert stats.output_tokens == 5936
    assert IDEAL_STEPS <= stats.steps <= 560
    assert stats.compilations_after_ready == 0
    bf16.engine.check()


@pytest.mark.parametrize("batching", ["static", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_other_policies_say_the_same_in_more_steps(
    bf16: LLM, together: list[RequestOutput], batching: str
) -> None:
    """On the same executables.  Exact counts are in tests/scheduler/test_policies.py."""
    runner = bf16.engine.runner
    config = replace(bf16.config, batching=batching)
    engine = Engine(
        runner,
        make_scheduler(config, runner.shapes, clock=time.monotonic, cost=None),
        bf16.tokenizer,
        end_ids=frozenset(),
        seed=0,
        asynchronous=True,
    )
    ids = [engine.submit(r["prompt_token_ids"], _params(r["max_tokens"])) for r in REQUESTS]
    outputs = {output.request_id: output for output in run_all(engine)}
    bf16.engine.scheduler.reset_prefix_cache()  # its pages were written by this engine
    for request_id, want in zip(ids, together, strict=True):
        assert outputs[request_id].outputs[0].token_ids == want.outputs[0].token_ids
    stats = engine.stats()
    assert stats.compilations_after_ready == 0
    assert stats.steps >= 1.8 * 560


def _assert_same_as_solo(llm: LLM, output: RequestOutput) -> None:
    want = output.outputs[0].token_ids
    solo = llm.generate({"prompt_token_ids": output.prompt_token_ids}, _params(len(want)))[0]
    assert solo.outputs[0].token_ids == want


def test_eight_requests_alone(bf16: LLM, together: list[RequestOutput]) -> None:
    for output in sorted(together, key=lambda o: len(o.outputs[0].token_ids))[:8]:
        _assert_same_as_solo(bf16, output)


@pytest.mark.slow
def test_every_request_alone(bf16: LLM, together: list[RequestOutput]) -> None:
    for output in together:
        _assert_same_as_solo(bf16, output)


def test_likelihood_of_a_known_text(bf16: LLM) -> None:
    assert bf16.score([PARA])[0].mean_nll == pytest.approx(MEAN_NLL, abs=0.03)


def test_auto_dtype_is_bfloat16(bf16: LLM) -> None:
    assert bf16.config.dtype == "auto"
    assert bf16.engine.describe()["dtype"] == "bfloat16"

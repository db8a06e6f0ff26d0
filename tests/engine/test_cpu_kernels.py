"""The engine on the CPU kernels: right tokens, the same bits under any schedule, one tree."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.compilations import CompileCounter
from jaxserve.weights import CPUPacked, canonical, serve
from tests.engine import native
from tests.engine.mini import Mini, greedy, prompts, run, tokens
from tests.engine.random_schedules import Tally, alone, requests, run_schedules
from tests.kernels.cpu_kernels import ALL, need
from tests.oracle import assert_same_greedy

SCHEDULES = 500
TIE = 0.06
"""Logits of bfloat16 weights and activations differ from float64's by less."""


@pytest.fixture(scope="module")
def kernels() -> str:
    return need(next((name for name in ALL if not _missing(name)), "avx2"))


@pytest.fixture(scope="module")
def mini_native(executables: Path, kernels: str) -> Mini:
    return native.build(executables, kernels)


def _missing(name: str) -> bool:
    try:
        need(name)
    except pytest.skip.Exception:
        return True
    return False


def test_what_runs_are_the_kernels(mini_native: Mini, kernels: str) -> None:
    """No product and no attention is left to XLA."""
    runner = mini_native.runner
    assert runner.spec.attention == f"cpu_{kernels}"
    assert runner.shapes.decode_rows == (1, 2, 4, 8)
    for step in runner._steps.values():
        text = step.result().as_text()
        assert f"jaxserve_{kernels}_norm_swiglu" in text
        assert f"jaxserve_{kernels}_norm_argmax" in text
        assert " dot(" not in text


@pytest.mark.parametrize("name", ALL)
def test_greedy_tokens_are_the_oracles(executables: Path, name: str) -> None:
    attention = "cpu_avx512_bf16" if name == "amx_emulated" else "auto"
    if name == "amx_emulated":
        need("avx512_bf16")
    few = {"batch_buckets": (8,), "prefill_buckets": (64,)}  # executables to compile
    mini = native.build(executables, need(name), attention_backend=attention, **few)
    asked = prompts([1, 2, 15, 16, 17, 40, 64])
    outputs = run(mini.engine(), [(prompt, greedy(12)) for prompt in asked])
    for prompt, output in zip(asked, outputs, strict=True):
        want, gaps = mini.oracle.greedy(prompt, 12)
        assert_same_greedy(output.outputs[0].token_ids, want, gaps, margin=TIE)


def test_no_bit_depends_on_the_schedule(mini_native: Mini) -> None:
    """Order, slots, chunks, budgets, preemption, prefix hits, several steps at once."""
    asked = requests()
    want = alone(mini_native, asked)
    counter = CompileCounter()
    tally = Tally()
    for tally in run_schedules(mini_native, asked, want, range(SCHEDULES)):
        assert tally.different == 0, tally
    assert tally.preemptions > 20
    assert tally.prefix_hits > 1000
    assert tally.mixed_steps > 1000
    assert tally.shared_dispatches > 1000
    assert counter.count == 0


def test_the_tree_that_users_see_is_canonical(mini_native: Mini, kernels: str) -> None:
    params, layout = native.bfloat16_params(), CPUPacked(kernels)
    back = canonical(serve(params, layout), layout)
    for got in (back, mini_native.runner.params):
        assert jax.tree.structure(got) == jax.tree.structure(params)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
            assert np.array_equal(np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16))


def test_new_weights_are_packed_again(executables: Path, kernels: str) -> None:
    mini = native.build(executables, kernels)
    engine, ask = mini.engine(), [(prompts([9])[0], greedy(12))]
    before = tokens(run(engine, ask))
    params = native.bfloat16_params()
    engine.update_weights(jax.tree.map(lambda x: x[::-1], params))
    assert tokens(run(engine, ask)) != before
    engine.update_weights(params)
    assert tokens(run(engine, ask)) == before
    with pytest.raises(ValueError, match="the new weights differ in these leaves"):
        engine.update_weights({**params, "odd": params["norm"]})
    with pytest.raises(ValueError, match="the engine serves bfloat16"):
        engine.update_weights({**params, "norm": params["norm"][:-1]})

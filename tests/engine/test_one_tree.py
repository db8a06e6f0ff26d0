"""One weight tree for generation and for gradients: differentiate, update, serve again."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxserve.models.llama import Params, bind, params_of
from jaxserve.models.scoring import sequence_log_prob
from tests.engine.asks import only
from tests.engine.mini import CONFIG, Mini, greedy, prompts, run, tokens
from tests.engine.weights import copy
from tests.oracle import Oracle, assert_same_greedy

TOKENS = prompts([24], seed=80)[0]
ROOT = Path(__file__).parents[2]


@jax.jit
def log_prob(params: Params) -> jax.Array:
    return sequence_log_prob(bind(CONFIG, params), TOKENS)


@pytest.fixture(scope="module")
def gradient(mini: Mini) -> Params:
    return jax.jit(jax.grad(log_prob))(mini.runner.params)


def shifted(params: Params, direction: Params, step: float) -> Any:
    return jax.tree.map(lambda p, d: np.asarray(p, np.float64) + step * d, params, direction)


def test_it_is_the_engines_score(mini: Mini) -> None:
    output = run(mini.engine(), [(TOKENS, greedy(0, prompt_logprobs=0))])[0]
    assert output.prompt_logprobs is not None
    scored = [e[t].logprob for e, t in zip(output.prompt_logprobs, TOKENS, strict=True) if e]
    assert float(log_prob(mini.runner.params)) == pytest.approx(sum(scored), abs=1e-3)


def test_a_single_token_scores_nothing(mini: Mini) -> None:
    score = jax.jit(lambda params: sequence_log_prob(bind(CONFIG, params), TOKENS[:1]))
    assert float(score(mini.runner.params)) == 0


def test_the_tree_is_the_modules(mini: Mini) -> None:
    params = mini.runner.params
    again = params_of(bind(CONFIG, params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a is b, again, params)))


def test_gradient_equals_finite_differences(mini: Mini, gradient: Params) -> None:
    """Central differences: of the function itself over all weights, of the oracle leaf by leaf."""
    params = mini.runner.params
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda p: rng.standard_normal(p.shape), params)
    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    slopes = [
        float((np.asarray(g, np.float64) * d).sum())
        for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
    ]

    step = 2e-4
    up, down = (
        float(log_prob(jax.tree.map(jnp.float32, shifted(params, direction, s))))
        for s in (step, -step)
    )
    assert (up - down) / (2 * step) == pytest.approx(sum(slopes), rel=2e-2)

    def oracle(path: Any, step: float) -> float:
        only_one = jax.tree_util.tree_map_with_path(
            lambda p, d: d if p == path else np.zeros_like(d), direction
        )
        rows = Oracle(CONFIG, shifted(params, only_one, step)).logprobs(TOKENS)
        return float(sum(row[t] for row, t in zip(rows, TOKENS[1:], strict=False)))

    step = 1e-6
    for path, slope in zip(paths, slopes, strict=True):
        difference = (oracle(path, step) - oracle(path, -step)) / (2 * step)
        assert difference == pytest.approx(slope, rel=1e-3, abs=1e-3), jax.tree_util.keystr(path)


def test_an_optimizer_step_is_served_at_once(mini: Mini, gradient: Params) -> None:
    """New weights, same executables; cached pages of the old weights are not read."""
    old = mini.runner.params
    optimizer = optax.sgd(0.02)
    updates, _ = optimizer.update(gradient, optimizer.init(old))
    new = optax.apply_updates(old, jax.tree.map(jnp.negative, updates))
    assert float(log_prob(new)) > float(log_prob(old)) + 1

    engine = mini.engine()
    asked = [TOKENS, *prompts([9, 33], seed=81)]
    requests = [(prompt, greedy(16)) for prompt in asked]
    before = run(engine, requests)
    again = run(engine, requests)
    assert tokens(again) == tokens(before)
    assert again[0].metrics.num_cached_tokens > 0
    try:
        engine.compilations.reset()
        engine.update_weights(new)
        after = run(engine, requests)
        assert engine.compilations.count == 0
        assert [output.metrics.num_cached_tokens for output in after] == [0, 0, 0]
        score = run(engine, [(TOKENS, greedy(0, prompt_logprobs=0))])[0].prompt_logprobs
        assert engine.compilations.count == 0
    finally:
        engine.update_weights(old)
    assert tokens(after) != tokens(before)
    oracle = Oracle(CONFIG, new)
    for prompt, output in zip(asked, after, strict=True):
        assert_same_greedy(only(output), *oracle.greedy(prompt, 16))
    assert score is not None
    scored = sum(e[t].logprob for e, t in zip(score, TOKENS, strict=True) if e)
    assert scored == pytest.approx(float(log_prob(new)), abs=1e-3)
    assert tokens(run(engine, requests)) == tokens(before)


def test_weights_that_do_not_fit_are_refused(mini: Mini) -> None:
    engine = mini.engine()
    params = copy(mini.runner.params)
    bad = [
        ({**params, "norm": params["norm"][:-1]}, r"\['norm'\] is float32\[63\]"),
        ({**params, "norm": params["norm"].astype(np.float16)}, r"\['norm'\] is float16\[64\]"),
        ({k: v for k, v in params.items() if k != "norm"}, r"differ in these leaves: \['norm'\]"),
        ({**params, "head": params["embed"]}, r"\['head'\]"),
    ]
    for tree, message in bad:
        with pytest.raises(ValueError, match=message):
            engine.update_weights(tree)
    request_id = engine.submit([1, 2, 3], greedy(3))
    with pytest.raises(ValueError, match="while no request is running"):
        engine.update_weights(params)
    engine.abort(request_id)
    engine.update_weights(params)
    want = mini.oracle.greedy([1, 2, 3], 3)
    assert_same_greedy(only(run(engine, [([1, 2, 3], greedy(3))])[0]), *want)


def test_the_example_runs(
    executables: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(executables))
    runpy.run_path(str(ROOT / "examples" / "weights_swap.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert "slots and steps stay." in lines[-2]
    assert lines[-1] == "compile events while serving: 0"

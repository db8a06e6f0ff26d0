"""NaN or infinite logits end one request and harm nobody (B22)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.asks import BAN, FORCE, only, sampled
from tests.engine.mini import CONFIG, Mini, drain, greedy, prompts, run, solo, tokens
from tests.engine.weights import copy, serving

POISON = 13
AXIS = 5


@pytest.fixture(scope="module")
def untied(executables: Path) -> Mini:
    """An output head of its own, so that a token's embedding can be broken without its logit.

    It is also the model whose head_dim is not hidden_size / num_heads.
    """
    config = replace(CONFIG, tie_embeddings=False, head_dim=32)
    return Mini.build(executables, config, batch_buckets=(8,), prefill_buckets=(16,))


def poisoned(params: Any, kind: str) -> Any:
    """Weights that give bad logits in a context with the token POISON, and good ones without.

    NaN reaches every later token through the keys and values.  An infinity is made in the logits
    themselves: the hidden axis AXIS is zero but for the token, and the head overflows on it.
    """
    params = copy(params)
    if kind == "nan":
        params["embed"][POISON] = np.nan
        return params
    params["embed"][:, AXIS] = 0
    params["embed"][POISON, AXIS] = 50
    for layer in params["layers"].values():
        layer["attn"]["out"][AXIS] = 0
        layer["mlp"]["down"][AXIS] = 0
    params["head"][:, AXIS] = 3e38 if kind == "+inf" else -3e38
    return params


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", ["nan", "+inf", "-inf"])
def test_logits_that_are_not_finite(untied: Mini, kind: str, asynchronous: bool) -> None:
    """The request ends with an error, its neighbours do not notice, its pages are fit for use."""
    ban = {POISON: BAN}
    healthy = [
        (prompts([6], seed=50)[0], greedy(30, logit_bias=ban, logprobs=2)),
        (prompts([19], seed=51)[0], sampled(30, temperature=1.0, seed=1, logit_bias=ban)),
        (prompts([33], seed=52)[0], greedy(30, logit_bias=ban, prompt_logprobs=1)),
    ]
    healthy = [([t if t != POISON else 14 for t in p], ask) for p, ask in healthy]
    bad_prompt = [*prompts([20], seed=53)[0], POISON]
    if kind == "nan":
        bad_prompt[10] = POISON  # in the first of two chunks
    bad = [
        greedy(8),
        sampled(8, temperature=1.0, seed=1, top_p=0.9, top_k=5, logprobs=3, n=2),
        greedy(8, prompt_logprobs=2),
        greedy(0, prompt_logprobs=0),
    ]
    with serving(untied, poisoned(untied.runner.params, kind)):
        want = tokens(solo(untied.engine(), healthy))
        # Few pages, so that those of the broken requests must be used again.
        engine = untied.engine(pages=26, asynchronous=asynchronous)
        ids = [engine.submit(*request) for request in healthy]
        for _ in range(4):
            engine.step()
        bad_ids = [engine.submit(bad_prompt, ask) for ask in bad]
        deltas = drain(engine)
        assert tokens([engine.take(i) for i in ids]) == want
        for _ in range(2):
            assert tokens(run(engine, healthy)) == want
    for request_id in bad_ids:
        output = engine.take(request_id)
        assert output.finished
        assert output.error is not None
        assert "not finite" in output.error
        for sample in output.outputs:
            assert (sample.finish_reason, sample.text, sample.token_ids) == ("error", "", [])
            ends = [d for d in deltas if (d.request_id, d.index) == (request_id, sample.index)]
            assert [d.finish_reason for d in ends] == ["error"]


def test_a_request_that_breaks_later_keeps_what_it_had(untied: Mini) -> None:
    with serving(untied, poisoned(untied.runner.params, "nan")):
        engine = untied.engine()
        prompt = [t if t != POISON else 14 for t in prompts([9], seed=54)[0]]
        force = greedy(12, logit_bias={POISON: FORCE})
        output = run(engine, [(prompt, force)])[0]
        assert output.outputs[0].finish_reason == "error"
        assert only(output) == [POISON]

"""Log-probabilities of answers and prompts are the model's own, whatever the schedule (B20)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.outputs import RequestOutput
from tests.engine.asks import only, sampled
from tests.engine.mini import Mini, greedy, logprobs, prompts, run, solo, tokens


@pytest.mark.parametrize("num_top", [0, 3, 5])
def test_logprobs_layout(mini: Mini, num_top: int) -> None:
    """One entry per token: the sampled token always, then the most likely, as the oracle says."""
    asked = prompts([6, 14], seed=43)
    hot = sampled(16, temperature=1.5, seed=2, logprobs=num_top)
    outputs = run(mini.engine(), [(p, hot) for p in asked])
    outside = 0
    for prompt, output in zip(asked, outputs, strict=True):
        sample = output.outputs[0]
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids) == 16
        oracle = mini.oracle.logprobs(prompt + sample.token_ids)
        for i, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
            row = oracle[len(prompt) - 1 + i]
            best = np.argsort(-row, kind="stable")[:num_top].tolist()
            outside += token not in best
            assert list(entry) == list(dict.fromkeys([token, *best]))
            for other, reported in entry.items():
                assert reported.logprob == pytest.approx(row[other], abs=1e-4)
                assert reported.rank == 1 + int((row > row[other]).sum())
                assert reported.decoded_token == mini.tokenizer.token_text(other)
            assert sum(np.exp(r.logprob) for r in entry.values()) <= 1 + 1e-6
        total = sum(logprobs(output))
        assert sample.cumulative_logprob == pytest.approx(total)
    assert outside > 4
    plain = run(mini.engine(), [(asked[0], replace(hot, logprobs=None))])[0].outputs[0]
    assert plain.logprobs is None
    assert plain.cumulative_logprob is None
    assert plain.token_ids == only(outputs[0])
    with pytest.raises(ValueError, match=r"logprobs=6.*max_logprobs=5"):
        mini.engine().submit([1], greedy(1, logprobs=6))


def check_prompt_logprobs(mini: Mini, output: RequestOutput, num_top: int) -> None:
    entries = output.prompt_logprobs
    prompt = output.prompt_token_ids
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    oracle = mini.oracle.logprobs(prompt)
    for row, token, entry in zip(oracle, prompt[1:], entries[1:], strict=False):
        assert entry is not None
        best = np.argsort(-row, kind="stable")[:num_top].tolist()
        assert list(entry) == list(dict.fromkeys([token, *best]))
        for other, reported in entry.items():
            assert reported.logprob == pytest.approx(row[other], abs=1e-4)
            assert reported.rank == 1 + int((row > row[other]).sum())


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("situation", ["plain", "chunked", "preempted", "scoring"])
def test_prompt_logprobs(mini: Mini, num_top: int, situation: str) -> None:
    """Equal to the oracle's, whatever the chunks, and the prefix cache is not read for them."""
    engine = mini.engine(
        chunk=7 if situation == "chunked" else None,
        budget=15 if situation == "chunked" else None,
        pages=14 if situation == "preempted" else None,
    )
    count = 0 if situation == "scoring" else 30
    ask = greedy(count, prompt_logprobs=num_top, logprobs=1 if count else None)
    requests = [(p, ask) for p in prompts([1, 2, 8, 16, 17, 40], seed=44)]
    want = tokens(solo(mini.engine(), [(p, replace(ask, prompt_logprobs=0)) for p, _ in requests]))
    for _ in range(2):
        outputs = run(engine, requests)
        assert tokens(outputs) == want
        for output in outputs:
            check_prompt_logprobs(mini, output, num_top)
            assert output.metrics.num_cached_tokens == 0
    assert (engine.stats().preemptions > 0) == (situation == "preempted")
    # A request that does not ask for them reads the pages that these have left.
    if situation == "plain":
        assert run(engine, [(requests[-1][0], greedy(1))])[0].metrics.num_cached_tokens == 32

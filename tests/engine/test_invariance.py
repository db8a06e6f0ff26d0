"""A request's tokens do not depend on what else the engine does (B01, B03, B06, B16)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.sampling_params import SamplingParams
from tests.engine.mini import CONFIG, Mini, drain, greedy, logprobs, prompts, run, solo, tokens
from tests.oracle import assert_same_greedy

LENGTHS = [1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 25]


def seeded(seed: int, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=max_tokens, ignore_eos=True)


def test_greedy_equals_the_oracle(mini: Mini) -> None:
    asked = prompts(LENGTHS)
    outputs = run(mini.engine(), [(p, greedy(24)) for p in asked])
    for prompt, output in zip(asked, outputs, strict=True):
        want, gaps = mini.oracle.greedy(prompt, 24)
        assert_same_greedy(output.outputs[0].token_ids, want, gaps)


@pytest.mark.parametrize("count", [1, 2, 7, 8, 11, 12])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_alone_together_shuffled_staggered(mini: Mini, count: int, kind: str) -> None:
    chosen = [greedy(16) if kind == "greedy" else seeded(100 + i) for i in range(count)]
    requests = list(zip(prompts(LENGTHS[:count]), chosen, strict=True))
    want = tokens(solo(mini.engine(), requests))
    assert tokens(run(mini.engine(), requests)) == want
    assert tokens(run(mini.engine(), requests, every=2)) == want
    assert tokens(run(mini.engine(asynchronous=False), requests)) == want
    order = random.Random(count).sample(range(count), count)
    shuffled = run(mini.engine(), [requests[i] for i in order])
    assert tokens(shuffled) == [want[i] for i in order]


@pytest.mark.parametrize("chunk", [16, 32])
def test_chunk_edges(mini: Mini, chunk: int) -> None:
    lengths = [1, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1]
    lengths.append(3 * chunk + 5)
    neighbours = [(p, greedy(60)) for p in prompts([5, 11], seed=7)]
    for prompt in prompts(lengths, seed=chunk):
        ask = greedy(12, logprobs=0)
        whole = run(mini.engine(chunk=64, budget=64), [(prompt, ask)])[0]
        engine = mini.engine(chunk=chunk, budget=chunk + 8)
        others = [engine.submit(*neighbour) for neighbour in neighbours]
        for _ in range(3):
            engine.step()
        request_id = engine.submit(prompt, ask)
        steps_before_first = -(-len(prompt) // chunk)
        deltas = []
        for _ in range(steps_before_first):
            deltas += [d for d in engine.step() if d.request_id == request_id]
        assert not deltas, "a token came before the last chunk was computed"
        drain(engine)
        chunked = engine.take(request_id)
        assert tokens([chunked]) == tokens([whole])
        assert logprobs(chunked)[0] == pytest.approx(logprobs(whole)[0], abs=1e-4)
        assert all(len(engine.take(other).outputs[0].token_ids) == 60 for other in others)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalties"])
def test_preempted_and_resumed(mini: Mini, kind: str, asynchronous: bool) -> None:
    fields = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    make = {
        "greedy": lambda i: greedy(64),
        "seeded": lambda i: seeded(i, max_tokens=64),
        "penalties": lambda i: greedy(64, **fields),
    }[kind]
    requests = [(prompt, make(i)) for i, prompt in enumerate(prompts([8] * 4))]
    want = run(mini.engine(), requests)
    # 72 tokens are 9 pages: a pool of 12 holds 1.3 sequences.
    engine = mini.engine(pages=13, asynchronous=asynchronous)
    ids = [engine.submit(*request) for request in requests]
    deltas = drain(engine)
    got = [engine.take(i) for i in ids]
    assert engine.stats().preemptions > 0
    assert tokens(got) == tokens(want)
    for request_id, output in zip(ids, got, strict=True):
        mine = [d for d in deltas if d.request_id == request_id]
        assert [t for d in mine for t in d.token_ids] == output.outputs[0].token_ids
        assert "".join(d.text for d in mine) == output.outputs[0].text
        assert len(output.outputs[0].token_ids) == 64
        assert len(output.prompt_token_ids) == 8
    assert sum(output.metrics.num_preemptions for output in got) == engine.stats().preemptions


def test_seed_in_every_situation(mini: Mini) -> None:
    prompt = prompts([40], seed=3)[0]
    ask = SamplingParams(temperature=0.8, seed=42, max_tokens=24, ignore_eos=True)
    want = tokens(solo(mini.engine(), [(prompt, ask)]))[0]
    unseeded = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True)
    others = [(p, unseeded) for p in prompts([9, 21, 33], seed=4)]
    strangers = [(p, seeded(i)) for i, p in enumerate(prompts([9, 21, 33], seed=5))]
    engine = mini.engine()
    assert tokens(run(engine, [*others, (prompt, ask)]))[-1] == want
    assert tokens(run(engine, [(prompt, ask), *strangers]))[0] == want  # with a prefix hit
    assert tokens(run(mini.engine(), [*strangers, (prompt, ask)], every=3))[-1] == want
    small = mini.engine(pages=13)
    assert tokens(run(small, [*others, (prompt, ask)]))[-1] == want
    assert small.stats().preemptions > 0
    assert tokens(run(mini.engine(chunk=16, budget=24), [(prompt, ask)]))[0] == want
    other = SamplingParams(temperature=0.8, seed=43, max_tokens=24, ignore_eos=True)
    assert tokens(run(mini.engine(), [(prompt, other)]))[0] != want


@pytest.fixture(scope="module")
def wide(executables: Path) -> Mini:
    """Wide enough that XLA reduces its rows in one way, however many there are.

    XLA's CPU backend sums small arrays in another order than larger ones (the border is at a few
    thousand elements), and MINI's hidden rows are on both sides of it.
    """
    config = replace(CONFIG, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64)
    return Mini.build(executables, config, prefill_buckets=(64,))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_logprobs_are_bit_identical(wide: Mini, asynchronous: bool) -> None:
    """Any order, neighbours and slots, pure decode steps or mixed ones: not a bit changes."""
    asked = prompts([3, 9, 16, 30, 47], seed=9)
    ask = greedy(16, logprobs=3)
    alone = [logprobs(o) for o in solo(wide.engine(), [(p, ask) for p in asked])]
    for seed in range(4):
        noise = [(p, seeded(i)) for i, p in enumerate(prompts([5, 12, 20], seed=20 + seed))]
        requests = [*noise, *((p, ask) for p in asked)]
        order = random.Random(seed).sample(range(len(requests)), len(requests))
        engine = wide.engine(asynchronous=asynchronous)
        outputs = run(engine, [requests[i] for i in order], every=seed % 3)
        for place, i in enumerate(order):
            if i >= len(noise):
                assert logprobs(outputs[place]) == alone[i - len(noise)]

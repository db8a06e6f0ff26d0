"""Nothing compiles after ready, whatever is asked, in whatever order (B48)."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.shapes import StepShape
from tests.engine.asks import assert_answers
from tests.engine.mini import CONFIG, Mini, run, tokens

VOCAB = CONFIG.vocab_size
NUM_REQUESTS = 520
LONGEST = 240
"""Tokens of the longest sequence that the small pool holds."""
FEATURES: list[tuple[str, Any]] = [
    # Name, and a value from a random generator.
    ("temperature", lambda r: r.choice([0, 1e-9, 0.3, 0.7, 1.0, 1.5, 3.0])),
    ("top_k", lambda r: r.choice([-1, 0, 1, 2, 50, VOCAB, 10 * VOCAB])),
    ("top_p", lambda r: r.choice([0, 1e-6, 0.1, 0.5, 0.95, 1.0])),
    ("min_p", lambda r: r.choice([0, 0.05, 0.5, 1.0])),
    ("presence_penalty", lambda r: r.uniform(-2, 2)),
    ("frequency_penalty", lambda r: r.uniform(-2, 2)),
    ("repetition_penalty", lambda r: r.uniform(0.5, 2)),
    ("seed", lambda r: r.getrandbits(63)),
    ("logprobs", lambda r: r.randint(0, 5)),
    ("prompt_logprobs", lambda r: r.randint(0, 5)),
    ("logit_bias", lambda r: {r.randrange(VOCAB): r.uniform(-100, 100) for _ in range(20)}),
    ("allowed_token_ids", lambda r: r.sample(range(VOCAB), r.choice([30, 100, VOCAB]))),
    ("stop_token_ids", lambda r: r.sample(range(VOCAB), r.choice([1, 20]))),
    ("stop", lambda r: r.choice(["e", ["ab", "\u00e9"], "xyz"])),
    ("include_stop_str_in_output", lambda r: True),
    ("ignore_eos", lambda r: True),
    ("min_tokens", lambda r: r.randint(1, 4)),
    ("skip_special_tokens", lambda r: False),
    ("n", lambda r: r.randint(2, 4)),
    ("structured_outputs", lambda r: r.choice([{"regex": "[a-z ]+"}, {"json_object": True}])),
]


def random_request(rng: random.Random, features: set[str]) -> tuple[list[int], SamplingParams]:
    chosen = rng.sample(FEATURES, rng.randint(0, 5))
    features |= {name for name, _ in chosen}
    fields = {name: make(rng) for name, make in chosen}
    length = rng.choice([rng.randint(1, 20), rng.randint(1, 60), rng.randint(1, LONGEST - 1)])
    max_tokens = rng.choice([4, 12, rng.randint(5, 40), 400 if length > LONGEST - 20 else 9])
    if "structured_outputs" in fields:
        fields.pop("allowed_token_ids", None)  # together they may allow nothing
    if "prompt_logprobs" in fields and rng.random() < 0.3:
        max_tokens, fields["min_tokens"] = 0, 0
    # Some prompts begin alike, so that they share pages.
    shared = random.Random(rng.randint(0, 2)).choices(range(256), k=length // 2)
    prompt = shared + rng.choices(range(VOCAB), k=length - len(shared))
    return prompt, SamplingParams(max_tokens=max_tokens, **fields)


def test_a_fuzz_of_everything_compiles_nothing(mini: Mini) -> None:
    """Any parameters and lengths, staggered, with aborts and preemptions: no compile event."""
    rng = random.Random(2026)
    engine = mini.engine(
        pages=-(-(LONGEST - 1) // 8) + 20,
        eos=frozenset({2, 7}),
        max_len=LONGEST,
        multi_step=4,
        policy="priority",
        preemption="swap",
        host_pages=20,
    )
    features: set[str] = set()
    requests = {}
    alive: list[str] = []
    done: dict[str, RequestOutput] = {}
    num_aborted = 0
    while len(requests) < NUM_REQUESTS or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 2]) if len(alive) < 12 else 0):
            if len(requests) < NUM_REQUESTS:
                prompt, params = random_request(rng, features)
                request_id = engine.submit(prompt, params, priority=rng.randint(0, 3))
                requests[request_id] = (prompt, params)
                alive.append(request_id)
        if alive and rng.random() < 0.04:
            engine.abort(rng.choice(alive))
            num_aborted += 1
        engine.step()
        engine.scheduler.check()
        for request_id in [i for i in alive if engine.output(i).finished]:
            alive.remove(request_id)
            done[request_id] = engine.take(request_id)
    engine.check()
    stats = engine.stats()
    assert engine.compilations.count == stats.compilations_after_ready == 0

    assert len(done) == NUM_REQUESTS
    assert all(output.error is None for output in done.values())
    reasons = {s.finish_reason for output in done.values() for s in output.outputs}
    assert reasons == {"stop", "length", "abort"}
    assert features == {name for name, _ in FEATURES}
    assert set(stats.steps_by_shape) == {str(shape) for shape in mini.runner.shapes.all()}
    assert stats.dispatches < stats.steps
    assert num_aborted > 20
    assert stats.preemptions > 20
    assert stats.prefix_hit_tokens > 1000
    assert {len(o.prompt_token_ids) for o in done.values()} >= {1, 2, 3}
    assert max(len(o.prompt_token_ids) for o in done.values()) > LONGEST - 10
    assert engine.scheduler.pool.num_held == 0

    # What had a seed is what it is alone.
    seeded = [
        i
        for i, (_, params) in requests.items()
        if params.seed is not None and not any(s.finish_reason == "abort" for s in done[i].outputs)
    ]
    for request_id in seeded[:16]:
        alone = run(mini.engine(eos=frozenset({2, 7}), max_len=LONGEST), [requests[request_id]])
        assert tokens(alone) == tokens([done[request_id]])
    assert engine.compilations.count == 0


def test_a_compilation_would_be_counted(mini: Mini) -> None:
    engine = mini.engine()
    jax.jit(lambda x: x + 1)(np.zeros(3))
    assert engine.stats().compilations_after_ready > 0


@pytest.mark.parametrize("wrong", ["longer", "shorter", "float", "matrix", "other shape"])
def test_a_wrong_shape_raises(mini: Mini, wrong: str) -> None:
    """Only what was compiled can be called; the engine stays usable."""
    engine = mini.engine()
    shape = StepShape(8, 16)
    size = mini.runner.spec.batch_layout(shape).packed_size
    packed: Any = {
        "longer": np.zeros(size + 1, np.int32),
        "shorter": np.zeros(size - 1, np.int32),
        "float": np.zeros(size, np.float32),
        "matrix": np.zeros((1, size), np.int32),
        "other shape": np.zeros(mini.runner.spec.batch_layout(StepShape(8, 0)).packed_size, "i4"),
    }[wrong]
    with pytest.raises((TypeError, ValueError)):
        mini.runner.run(packed, shape)
    with pytest.raises((TypeError, ValueError)):
        mini.runner.set_slot(np.zeros(7, np.int32))
    with pytest.raises(KeyError):
        mini.runner.run(packed, StepShape(8, 17))
    assert_answers(mini, engine)
    assert engine.compilations.count == 0


def test_lengths_and_batch_sizes_compile_nothing(mini: Mini) -> None:
    """B48: 1 to all slots, prompts of every length up to the longest."""
    engine = mini.engine()
    lengths = list(range(1, 256))
    random.Random(1).shuffle(lengths)
    params = SamplingParams(temperature=0, max_tokens=1)
    for count in range(1, 9):
        batch, lengths = lengths[: 4 * count], lengths[4 * count :]
        for length in batch:
            engine.submit([5] * length, replace(params, max_tokens=min(3, 256 - length)))
        while engine.has_work:
            engine.step()
    assert engine.compilations.count == 0

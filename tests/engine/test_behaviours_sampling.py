"""What a request asks of sampling is done to it, and to nobody else (B10, B12, B14-B19, B21)."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from jaxserve.sampling_params import SamplingParams
from tests.engine.asks import BAN, FORCE, assert_answers, only, sampled
from tests.engine.mini import CONFIG, Mini, greedy, logprobs, prompts, run, solo, tokens
from tests.engine.weights import copy, serving
from tests.oracle import assert_same_greedy

VOCAB = CONFIG.vocab_size


def adjusted(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    *,
    presence: float = 0,
    frequency: float = 0,
    repetition: float = 1,
    bias: dict[int, float] | None = None,
) -> np.ndarray:
    """Penalties and bias by their definitions."""
    counts = np.bincount(output, minlength=VOCAB)
    repeated = (counts > 0) | (np.bincount(prompt, minlength=VOCAB) > 0)
    scaled = np.where(logits > 0, logits / repetition, logits * repetition)
    out = np.where(repeated, scaled, logits)
    out = out - frequency * counts - presence * (counts > 0)
    for token, value in (bias or {}).items():
        out[token] += value
    return out


def reference_greedy(
    mini: Mini, prompt: list[int], count: int, **adjustments: Any
) -> tuple[list[int], list[float]]:
    """Greedy tokens after adjustments, with the gaps between the two best."""
    output: list[int] = []
    gaps = []
    for _ in range(count):
        last = mini.oracle.logits(prompt + output)[-1]
        last = adjusted(last, prompt, output, **adjustments)
        second, first = np.sort(last)[-2:]
        gaps.append(float(first - second))
        output.append(int(last.argmax()))
    return output, gaps


def test_greedy_and_sampled_rows_do_not_mix(mini: Mini) -> None:
    asked = prompts([6, 9, 13, 7, 11], seed=31)
    rows = [
        greedy(20),
        sampled(20, temperature=1.35, top_k=7, seed=1),
        sampled(20, temperature=0.7, top_p=0.5, seed=2),
        sampled(20, temperature=1.0, top_k=1, seed=3),
        sampled(20, temperature=1.0, min_p=0.2, seed=4),
    ]
    requests = list(zip(asked, rows, strict=True))
    want = tokens(solo(mini.engine(), requests))
    for i in (0, 3):
        assert_same_greedy(want[i][0], *mini.oracle.greedy(asked[i], 20))
    for order in list(permutations(range(5)))[::30]:
        got = tokens(run(mini.engine(), [requests[i] for i in order]))
        assert got == [want[i] for i in order]


def test_ties_go_to_the_lowest_id(mini: Mini) -> None:
    """Two tokens of equal embedding have equal logits, whatever the context."""
    params = copy(mini.runner.params)
    params["embed"][200] = params["embed"][100]
    tied = {200: FORCE, 100: FORCE}
    rows = [
        greedy(6, logit_bias=tied),
        sampled(40, temperature=1.0, logit_bias=tied, seed=5),
        sampled(6, temperature=1.0, logit_bias=tied, top_k=1, seed=6),
    ]
    with serving(mini, params):
        outputs = run(mini.engine(), [(prompts([5])[0], ask) for ask in rows])
    assert only(outputs[0]) == [100] * 6
    assert set(only(outputs[1])) == {100, 200}
    assert only(outputs[2]) == [100] * 6


@pytest.mark.parametrize(
    "fields",
    [{"top_p": p} for p in (0, 1e-9, 1e-4)] + [{"temperature": t} for t in (1e-12, 1e-6, 1e-4)],
)
def test_edges_that_mean_greedy(mini: Mini, fields: dict[str, float]) -> None:
    asked = prompts([6, 9, 13], seed=32)
    ask = sampled(16, **{"temperature": 1.0, "seed": 1, **fields})
    noise = [(p, sampled(16, temperature=1.0, seed=9)) for p in prompts([5, 8], seed=33)]
    outputs = run(mini.engine(), [*noise, *((p, ask) for p in asked)])
    for prompt, output in zip(asked, outputs[2:], strict=True):
        assert_same_greedy(only(output), *mini.oracle.greedy(prompt, 16))


def test_large_logits_and_small_temperatures(mini: Mini) -> None:
    """Logits of about 10,000, divided by as little as 1e-12, stay finite."""
    params = copy(mini.runner.params)
    params["norm"] *= 3000
    prompt = prompts([9], seed=34)[0]
    with serving(mini, params):
        want = tokens(solo(mini.engine(), [(prompt, greedy(12, logprobs=0))]))[0]
        rows = [sampled(12, temperature=t, seed=1) for t in (1e-12, 1e-6, 1e-4, 1e-3)]
        outputs = run(mini.engine(), [(prompt, ask) for ask in rows])
    assert mini.oracle.logits(prompt)[-1].max() * 3000 > 5000
    assert tokens(outputs) == [want] * 4


def test_top_p_near_one_and_off(mini: Mini) -> None:
    prompt = prompts([9], seed=35)[0]
    off, one, near = (sampled(40, seed=3, **f) for f in ({}, {"top_p": 1.0}, {"top_p": 0.999999}))
    engine = mini.engine()
    outputs = run(engine, [(prompt, ask) for ask in (off, one, near)])
    assert only(outputs[0]) == only(outputs[1])
    assert len(only(outputs[2])) == 40
    assert_answers(mini, engine)


@pytest.mark.parametrize("together", [False, True])
def test_top_k_edges(mini: Mini, together: bool) -> None:
    prompt = prompts([9], seed=36)[0]
    asks = [sampled(20, seed=4, top_k=k) for k in (-1, 0, VOCAB, VOCAB + 1, 9999999, VOCAB - 1, 1)]
    requests = [(prompt, ask) for ask in asks]
    send = run if together else solo
    outputs = send(mini.engine(), requests)
    got = [only(output) for output in outputs]
    assert got[:5] == [got[0]] * 5
    assert len(set(got[5])) > 1
    assert_same_greedy(got[6], *mini.oracle.greedy(prompt, 20))
    with pytest.raises(ValueError, match=r"top_k=-2"):
        sampled(1, top_k=-2)


def test_top_k_and_min_p_keep_what_they_say(mini: Mini) -> None:
    """Every token drawn is among the kept ones of the oracle's distribution."""
    asked = prompts([6, 9, 13, 8], seed=37)
    asks = [
        sampled(30, temperature=1.5, top_k=4, seed=1),
        sampled(30, temperature=2.0, min_p=0.1, seed=2),
        sampled(30, temperature=1.0, top_p=0.3, seed=3),
        sampled(30, temperature=1.5, top_k=40, top_p=0.5, seed=4),
    ]
    outputs = run(mini.engine(), list(zip(asked, asks, strict=True)))
    for prompt, ask, output in zip(asked, asks, outputs, strict=True):
        assert len(set(only(output))) > 4
        for i, token in enumerate(only(output)):
            logits = mini.oracle.logits(prompt + only(output)[:i])[-1] / ask.temperature
            probability = np.exp(logits - logits.max())
            probability /= probability.sum()
            order = np.argsort(-probability)
            rank = int(np.where(order == token)[0][0])
            assert probability[token] >= ask.min_p * probability.max() * 0.999
            if ask.top_k > 0:
                assert rank < ask.top_k
                probability[order[ask.top_k :]] = 0
                probability /= probability.sum()
            assert probability[order[:rank]].sum() < ask.top_p + 1e-4


BAD_BIAS: list[tuple[Any, str]] = [
    ({VOCAB: 5.0}, f"{VOCAB}.*vocabulary of {VOCAB}"),
    ({-1: 5.0}, r"-1.*vocabulary"),
    ({"-1": 5.0}, r"-1.*vocabulary"),
    ({"abc": 1.0}, "'abc'"),
    ({1.5: 1.0}, r"1\.5"),
    ({True: 1.0}, "True"),
    ({5: 1000.0}, r"1000.*\[-100, 100\]"),
    ({5: float("nan")}, "nan"),
    ({5: "x"}, "'x'"),
    ([5], "must map"),
    (dict.fromkeys(range(301), 1.0), "301 entries"),
]


@pytest.mark.parametrize(("bias", "message"), BAD_BIAS)
def test_bad_logit_bias_is_refused(mini: Mini, bias: Any, message: str) -> None:
    engine = mini.engine()
    with pytest.raises(ValueError, match=message):
        engine.submit([1, 2, 3], greedy(4, logit_bias=bias))
    assert not engine.has_work
    assert_answers(mini, engine)


def test_logit_bias_forces_and_bans(mini: Mini) -> None:
    prompt = prompts([9], seed=38)[0]
    plain, gaps = mini.oracle.greedy(prompt, 8)
    best = plain[0]
    engine = mini.engine()
    none, forced, banned, sampled_forced = run(
        engine,
        [
            (prompt, greedy(8, logit_bias={})),
            (prompt, greedy(8, logit_bias={"77": FORCE})),
            (prompt, greedy(8, logit_bias={best: BAN}, logprobs=1)),
            (prompt, sampled(8, temperature=1.0, seed=1, logit_bias={77: FORCE})),
        ],
    )
    assert_same_greedy(only(none), plain, gaps)
    assert only(forced) == only(sampled_forced) == [77] * 8
    assert best not in only(banned)
    assert_same_greedy(only(banned), *reference_greedy(mini, prompt, 8, bias={best: BAN}))
    # Log-probabilities are the model's own: the banned token still is the most likely one.
    reported = banned.outputs[0].logprobs
    assert reported is not None
    assert reported[0][best].rank == 1
    want = mini.oracle.logprobs(prompt)[-1]
    assert reported[0][best].logprob == pytest.approx(want[best], abs=1e-4)


def test_allowed_token_ids(mini: Mini) -> None:
    prompt = prompts([9], seed=39)[0]
    allowed = [0, 31, 32, 63, 64, 200, VOCAB - 1]
    asks = [
        greedy(20, allowed_token_ids=allowed),
        sampled(60, temperature=2.0, seed=1, allowed_token_ids=allowed),
        sampled(20, temperature=2.0, seed=1, allowed_token_ids=allowed, logit_bias={5: FORCE}),
        greedy(20, allowed_token_ids=allowed, logit_bias={200: BAN, 5: FORCE}),
        greedy(4, allowed_token_ids=[VOCAB - 1]),
        greedy(20),
    ]
    outputs = run(mini.engine(), [(prompt, ask) for ask in asks])
    bias = {i: -1e9 for i in range(VOCAB) if i not in allowed}
    assert_same_greedy(only(outputs[0]), *reference_greedy(mini, prompt, 20, bias=bias))
    assert set(only(outputs[1])) == set(allowed)
    assert set(only(outputs[2])) <= set(allowed)
    assert set(only(outputs[3])) <= set(allowed) - {200}
    assert only(outputs[4]) == [VOCAB - 1] * 4
    assert_same_greedy(only(outputs[5]), *mini.oracle.greedy(prompt, 20))
    for bad, message in (([], "allows no token"), ([VOCAB], "vocabulary"), ([1.0], "token ids")):
        with pytest.raises(ValueError, match=message):
            mini.engine().submit(prompt, greedy(1, allowed_token_ids=bad))


PENALTIES: list[dict[str, float]] = [
    {"presence": 2.0},
    {"frequency": 2.0},
    {"presence": -1.0, "frequency": 0.25},
    {"repetition": 1.5},
    {"repetition": 0.7},
    {"presence": 0.5, "frequency": 0.5, "repetition": 1.2},
]


def penalised(max_tokens: int, penalties: dict[str, float], **fields: Any) -> SamplingParams:
    named = {f"{name}_penalty": value for name, value in penalties.items()}
    return greedy(max_tokens, **named, **fields)


def test_presence_and_frequency_do_not_count_the_prompt(mini: Mini) -> None:
    """A token that fills the prompt and leads by 1 still wins; repetition does count it."""
    token = 40
    prompt = [token] * 30
    logits = mini.oracle.logits(prompt)[-1]
    lead = float(logits.max() - logits[token]) + 1
    asks = [penalised(1, p, logit_bias={token: lead}) for p in ({}, *PENALTIES[:2])]
    assert [only(o) for o in run(mini.engine(), [(prompt, a) for a in asks])] == [[token]] * 3
    counted = penalised(1, {"repetition": 100.0}, logit_bias={token: lead})
    want = reference_greedy(mini, prompt, 1, repetition=100.0, bias={token: lead})
    got = only(run(mini.engine(), [(prompt, counted)])[0])
    assert_same_greedy(got, *want)


@pytest.mark.parametrize("preempted", [False, True])
def test_penalties_by_definition(mini: Mini, preempted: bool) -> None:
    """A bias makes few tokens likely, so that they are repeated; counts survive preemption."""
    prompt = [40, 41] * 7
    bias = {40: 3.0, 41: 3.5, 42: 3.5, 43: 2.5}
    requests = [(prompt, penalised(24, p, logit_bias=bias)) for p in PENALTIES]
    engine = mini.engine(pages=13 if preempted else None)
    outputs = run(engine, requests)
    assert (engine.stats().preemptions > 0) == preempted
    for penalties, output in zip(PENALTIES, outputs, strict=True):
        assert_same_greedy(
            only(output), *reference_greedy(mini, prompt, 24, bias=bias, **penalties)
        )


@pytest.mark.parametrize("penalty", [1e-3, 1e3])
def test_extreme_repetition_penalties_stay_finite(mini: Mini, penalty: float) -> None:
    prompt = prompts([9])[0]
    asks = [sampled(12, temperature=1.0, top_k=k, repetition_penalty=penalty) for k in (0, 5)]
    for output in run(mini.engine(), [(prompt, ask) for ask in asks]):
        assert max(only(output)) < VOCAB
    with pytest.raises(ValueError, match=r"repetition_penalty=.* must be in \[0.001, 1000"):
        sampled(1, repetition_penalty=penalty**2)


def test_seeded_samples_survive_preemption(mini: Mini) -> None:
    """Penalties, log-probabilities and two samples per request, under pressure."""
    ask = sampled(
        24, temperature=1.2, seed=7, n=2, frequency_penalty=0.5, logprobs=3, repetition_penalty=1.1
    )
    requests = [(p, replace(ask, seed=i)) for i, p in enumerate(prompts([11, 17, 6], seed=40))]
    want = run(mini.engine(), requests)
    engine = mini.engine(pages=15)
    got = run(engine, requests)
    assert engine.stats().preemptions > 0
    assert tokens(got) == tokens(want)
    for a, b in zip(got, want, strict=True):
        assert logprobs(a) == pytest.approx(logprobs(b), abs=1e-4)


def test_seeded_samples_without_chunked_prefill(mini: Mini) -> None:
    requests = [
        (p, sampled(20, seed=i)) for i, p in enumerate(prompts([40, 9, 33, 21, 44], seed=47))
    ]
    whole = mini.engine(enable_chunked_prefill=False, max_len=64)
    assert tokens(run(whole, requests)) == tokens(run(mini.engine(chunk=11), requests))


@pytest.mark.parametrize("ends", ["eos", "stop_token_ids"])
def test_min_tokens_holds_back_every_end_token(mini: Mini, ends: str) -> None:
    prompt = prompts([9], seed=41)[0]
    both = {"min_tokens": 10, "max_tokens": 20, "logit_bias": {2: FORCE, 7: FORCE}}
    if ends == "eos":
        engine = mini.engine(eos=frozenset({2, 7}))
        asks = [SamplingParams(temperature=t, seed=1, **both) for t in (0, 1.5)]
    else:
        engine = mini.engine()
        asks = [SamplingParams(temperature=0, stop_token_ids=[7, 2], **both)]
    neighbour = (prompts([5], seed=42)[0], greedy(24))
    for output in run(engine, [*((prompt, ask) for ask in asks), neighbour])[:-1]:
        sample = output.outputs[0]
        assert len(sample.token_ids) == 11
        assert not {2, 7} & set(sample.token_ids[:10])
        assert sample.token_ids[10] in {2, 7}
        assert sample.finish_reason == "stop"
        assert sample.stop_reason == (None if ends == "eos" else sample.token_ids[10])


def test_min_tokens_and_stop_strings(mini: Mini) -> None:
    """Stop strings are not looked for before min_tokens."""
    prompt = prompts([9], seed=41)[0]
    letters = list(range(97, 123))
    stop_at_once = {"stop": [chr(i) for i in letters], "allowed_token_ids": letters}
    early, late = run(
        mini.engine(),
        [
            (prompt, greedy(20, **stop_at_once)),
            (prompt, greedy(20, min_tokens=10, **stop_at_once)),
        ],
    )
    assert len(only(early)) == 1
    assert early.outputs[0].text == ""
    assert len(only(late)) == 10
    assert len(late.outputs[0].text) == 9
    assert late.outputs[0].finish_reason == "stop"
    with pytest.raises(ValueError, match=r"min_tokens=21.*max_tokens=20"):
        greedy(20, min_tokens=21)
    with pytest.raises(ValueError, match="holds back every one"):
        mini.engine().submit(
            prompt, greedy(20, min_tokens=1, stop_token_ids=[5], allowed_token_ids=[5])
        )


@pytest.mark.parametrize("count", [1, 2, 33])
@pytest.mark.parametrize("eos", [{2}, {2, 7, 9}])
def test_ignore_eos_and_exact_counts(mini: Mini, count: int, eos: set[int]) -> None:
    engine = mini.engine(eos=frozenset(eos))
    bias = dict.fromkeys(eos, FORCE)
    asks = [
        SamplingParams(temperature=t, seed=1, max_tokens=count, ignore_eos=ignore, logit_bias=bias)
        for t in (0, 1)
        for ignore in (True, False)
    ]
    outputs = run(engine, [(prompts([9])[0], ask) for ask in asks])
    for ask, output in zip(asks, outputs, strict=True):
        sample = output.outputs[0]
        if ask.ignore_eos:
            assert len(sample.token_ids) == count
            assert set(sample.token_ids) <= eos
            assert sample.finish_reason == "length"
        else:
            assert (len(sample.token_ids), sample.text) == (1, "")
            assert sample.finish_reason == "stop"


def test_several_samples(mini: Mini) -> None:
    """Sample i is a function of prompt, seed and i: not of n, nor of the batch."""
    prompt = prompts([13], seed=45)[0]
    ask = sampled(16, temperature=1.0, seed=3)
    five = run(mini.engine(), [(prompt, replace(ask, n=5))])[0]
    samples = [sample.token_ids for sample in five.outputs]
    assert [sample.index for sample in five.outputs] == list(range(5))
    assert len({tuple(sample) for sample in samples}) == 5
    for n in (1, 2, 3):
        separate = run(mini.engine(), [(prompt, replace(ask, n=n))])
        assert tokens(separate) == [samples[:n]]
    noise = [(p, sampled(30, seed=8, n=3)) for p in prompts([5, 21], seed=46)]
    engine = mini.engine(pages=20)
    crowded = run(engine, [*noise, (prompt, replace(ask, n=5))], every=1)[-1]
    assert engine.stats().preemptions > 0
    assert tokens([crowded]) == [samples]
    same = run(mini.engine(), [(prompt, greedy(8, n=3))])[0]
    assert len({tuple(sample.token_ids) for sample in same.outputs}) == 1


def test_samples_end_each_in_its_own_time(mini: Mini) -> None:
    engine = mini.engine(eos=frozenset(range(0, 300, 4)))
    request_id = engine.submit(
        prompts([5])[0], SamplingParams(n=6, temperature=1.5, seed=1, max_tokens=12)
    )
    ended: dict[int, str] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.index not in ended
            if delta.finish_reason is not None:
                ended[delta.index] = delta.finish_reason
        assert engine.output(request_id).finished == (len(ended) == 6)
    engine.check()
    output = engine.take(request_id)
    assert {s.index: s.finish_reason for s in output.outputs} == ended
    assert len({len(s.token_ids) for s in output.outputs}) > 2


def test_requests_without_a_seed_draw_one_each(mini: Mini) -> None:
    prompt = prompts([13], seed=45)[0]
    ask = sampled(16, temperature=1.0)

    def draw(seed: int) -> list[list[list[int]]]:
        return tokens(run(mini.engine(seed=seed), [(prompt, ask)] * 3))

    first = draw(1)
    assert len({tuple(sample[0]) for sample in first}) == 3
    assert draw(1) == first
    assert draw(2) != first

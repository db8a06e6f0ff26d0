"""The sampler's parts against NumPy, its draws against their distribution, and what a row's
result must not depend on (B10, B12, B14, B15, B16, B22)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

from jaxserve.sampler import argmax, filtered_weights, inverse_cdf, token_logprobs, top_k
from jaxserve.sampling_params import SamplingParams
from tests.engine.slots import NUM_SLOTS, NUM_TOP, VOCAB, Slot, carry_of, draw, run_sample, zeros

ROWS = NUM_SLOTS
FALSE_ALARM = 1e-6
"""Probability with which right code fails a statistical test for a seed; seeds are fixed."""


def normal(seed: int, *shape: int, scale: float = 4.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields})


# The largest and its ties


def tied(vocab: int, seed: int) -> np.ndarray:
    """Logits of few distinct values, the largest at both ends of blocks of 64 among others."""
    logits = np.random.default_rng(seed).integers(-3, 3, (ROWS, vocab)).astype(np.float32)
    logits[0] = 0.0
    logits[1, -1] = 9.0
    logits[2, [vocab // 2, vocab - 1]] = 9.0
    logits[3] = -np.inf
    logits[3, vocab - 1] = -5.0
    return logits


@pytest.mark.parametrize("vocab", [1, 63, 64, 200, 257])
def test_argmax_takes_the_lowest_of_equal_logits(vocab: int) -> None:
    for seed in range(5):
        logits = tied(vocab, seed)
        assert np.array_equal(jax.jit(argmax)(logits), logits.argmax(-1))


@pytest.mark.parametrize(("vocab", "k"), [(200, 3), (200, 4), (200, 5), (3, 5), (640, 10), (5, 0)])
def test_top_k_equals_a_stable_sort(vocab: int, k: int) -> None:
    compiled = jax.jit(functools.partial(top_k, k=k))
    for seed in range(5):
        for logits in (tied(vocab, seed), normal(seed, ROWS, vocab)):
            values, ids = map(np.asarray, compiled(logits))
            want = np.argsort(-logits, -1, kind="stable")[:, :k]
            found = want.shape[1]  # fewer than k in a small vocabulary
            assert values.shape == ids.shape == (ROWS, k)
            assert np.array_equal(ids[:, :found], want)
            assert np.array_equal(values[:, :found], np.take_along_axis(logits, want, 1))
            assert np.isneginf(values[:, found:]).all()


def test_token_logprobs() -> None:
    logits = np.concatenate([normal(0, ROWS // 2, VOCAB), tied(VOCAB, 0)[: ROWS // 2]])
    logits[0] *= 1e3
    token = np.array([5, 0, 199, 64, 7, 199, 100, 199], np.int32)
    compiled = jax.jit(functools.partial(token_logprobs, num_top=NUM_TOP))
    logprob, rank, ids, top = map(np.asarray, compiled(logits, token))
    want = stats_log_softmax(logits)
    np.testing.assert_allclose(logprob, want[np.arange(ROWS), token], rtol=1e-5, atol=1e-5)
    mine = logits[np.arange(ROWS), token]
    assert np.array_equal(rank, 1 + (logits > mine[:, None]).sum(-1))
    assert np.array_equal(ids, np.argsort(-logits, -1, kind="stable")[:, :NUM_TOP])
    np.testing.assert_allclose(top, np.take_along_axis(want, ids, 1), rtol=1e-5, atol=1e-5)
    assert (np.exp(top.astype(np.float64)).sum(-1) <= 1 + 1e-5).all()


def stats_log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    top = wide.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))


# Filters

_filter = jax.jit(filtered_weights)


def filtered(scaled: np.ndarray, **asked: Any) -> np.ndarray:
    """`filtered_weights`, each argument one value per row or one for all."""
    off = {"top_k": VOCAB, "top_p": 1.0, "min_p": 0.0}
    types = {"top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    each = {k: np.broadcast_to(np.array(v, types[k]), ROWS) for k, v in {**off, **asked}.items()}
    return np.asarray(_filter(scaled, **each))


def kept_by_sorting(scaled: np.ndarray, k: int, p: float, min_p: float) -> np.ndarray:
    """Which tokens of one row stay, by a sort, in float64; ties with the last one stay too."""
    weights = np.exp(scaled.astype(np.float64))
    kept = weights >= min_p
    order = np.argsort(-scaled, kind="stable")
    kept &= scaled >= scaled[order[min(k, VOCAB) - 1]]
    if p < 1:
        mass = np.cumsum(np.where(kept, weights, 0.0)[order])
        last = order[np.argmax(mass >= p * mass[-1])]
        kept &= scaled >= scaled[last]
    return kept & (weights > 0)


def scaled_rows(seed: int) -> np.ndarray:
    """Peaked, flat, uniform, one-hot and tied rows, the largest of each 0."""
    rng = np.random.default_rng(seed)
    logits = normal(seed, ROWS, VOCAB, scale=1.0) * np.array([[8, 4, 2, 1, 0.1, 0, 0, 0]]).T
    logits[5] = 3.0
    logits[6] = np.where(np.arange(VOCAB) == 77, 0, -np.inf)
    logits[7] = rng.integers(-6, 1, VOCAB)
    logits = logits.astype(np.float32)
    return logits - logits.max(-1, keepdims=True)


@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("p", [1.0, 0.999, 0.9, 0.5, 0.1])
@pytest.mark.parametrize("k", [1, 2, 17, VOCAB - 1, VOCAB])
def test_filters_equal_a_sort(k: int, p: float, min_p: float) -> None:
    for seed in range(3):
        scaled = scaled_rows(seed)
        got = filtered(scaled, top_k=k, top_p=p, min_p=min_p)
        want = np.stack([kept_by_sorting(row, k, np.float32(p), min_p) for row in scaled])
        assert np.array_equal(got > 0, want)
        np.testing.assert_allclose(got[want], np.exp(scaled)[want], rtol=1e-6)


def test_rows_with_filters_of_their_own() -> None:
    scaled = scaled_rows(9)
    k, p, m = [VOCAB, 3, VOCAB, 9, 50, VOCAB, 1, 2], [1, 1, 0.3, 0.7, 0.9, 1, 1, 0.5], [0.0] * ROWS
    m[3] = m[4] = 0.1
    got = filtered(scaled, top_k=k, top_p=p, min_p=m)
    for row in range(ROWS):
        want = kept_by_sorting(scaled[row], k[row], np.float32(p[row]), m[row])
        assert np.array_equal(got[row] > 0, want)
        alone = np.broadcast_to(scaled[row], scaled.shape)
        same = filtered(alone, top_k=k[row], top_p=p[row], min_p=m[row])
        assert np.array_equal(same[5].view(np.int32), got[row].view(np.int32))


@pytest.mark.parametrize("p", [1e-4, 1e-9, 1e-38, 1e-40, 1e-46, 5e-324])
def test_a_tiny_top_p_keeps_the_most_likely_and_its_ties(p: float) -> None:
    """Down to values that are zero in float32."""
    scaled = scaled_rows(0)
    assert np.array_equal(filtered(scaled, top_p=p) > 0, scaled == 0)


def test_a_top_p_just_below_one() -> None:
    """It may drop no more than its share of the mass, and nothing of a uniform or one-hot row."""
    scaled = scaled_rows(0)
    weights = np.exp(scaled.astype(np.float64))
    for p in (0.999999, float(np.nextafter(np.float32(1), np.float32(0)))):
        got = filtered(scaled, top_p=p) > 0
        assert np.array_equal(got[5:7], weights[5:7] > 0)
        dropped = np.where(got, 0, weights).sum(-1) / weights.sum(-1)
        assert (dropped <= 1 - p + 1e-6).all()


def test_filters_that_are_off_keep_every_bit() -> None:
    scaled = scaled_rows(0)
    want = np.asarray(jax.jit(jax.numpy.exp)(scaled))
    assert np.array_equal(filtered(scaled).view(np.int32), want.view(np.int32))


# Draws from weights

_inverse = jax.jit(inverse_cdf)


def inverse(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    return np.asarray(_inverse(weights.astype(np.float32), uniforms.astype(np.float32)))


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Probability of counts at least as unlikely, rare categories taken together."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    got = [*counts[~rare], counts[rare].sum()]
    want = [*expected[~rare], expected[rare].sum()]
    if want[-1] == 0:
        assert got.pop() == 0
        want.pop()
    statistic = sum((g - w) ** 2 / w for g, w in zip(got, want, strict=True))
    return float(stats.chi2.sf(statistic, len(want) - 1))


@pytest.mark.parametrize("kind", ["flat", "skewed", "sparse"])
def test_tokens_are_drawn_in_proportion_to_their_weights(kind: str) -> None:
    """Chi-square of 40,000 draws; see `FALSE_ALARM`."""
    rng = np.random.default_rng(3)
    weights = {
        "flat": rng.random(VOCAB),
        "skewed": np.exp(rng.normal(0, 3, VOCAB)),
        "sparse": np.where(rng.random(VOCAB) < 0.1, rng.random(VOCAB), 0),
    }[kind]
    rows, calls = 2000, 20
    counts = np.zeros(VOCAB)
    for _ in range(calls):
        drawn = inverse(np.broadcast_to(weights, (rows, VOCAB)), rng.random((rows, 2)))
        counts += np.bincount(drawn, minlength=VOCAB)
    assert not counts[weights == 0].any()
    assert chi_square(counts, weights / weights.sum()) > FALSE_ALARM


def test_a_token_without_weight_is_never_drawn() -> None:
    """At both ends of the uniforms, with removed tokens at both ends and whole empty blocks."""
    rng = np.random.default_rng(0)
    below_one = float(np.nextafter(np.float32(1), np.float32(0)))
    edges = np.array([0, 1e-45, 1e-30, 2.0**-24, 0.5, 1 - 2.0**-23, below_one], np.float32)
    uniforms = np.stack([a.ravel() for a in np.meshgrid(edges, edges)], 1)
    for trial in range(60):
        scaled = rng.normal(0, rng.choice([0, 1, 10, 40]), VOCAB)
        weights = np.exp(scaled - scaled.max()).astype(np.float32)
        if trial % 3 == 0:
            weights[64:128] = 0
        weights[rng.random(VOCAB) < rng.choice([0, 0.5, 0.9])] = 0
        weights[: rng.integers(0, 60)] = weights[rng.integers(140, 200) :] = 0
        weights[rng.integers(0, VOCAB)] = 1
        drawn = inverse(np.broadcast_to(weights, (len(uniforms), VOCAB)), uniforms)
        assert (weights[drawn] > 0).all()
        # XLA may take subnormal weights for zero.
        assert drawn[0] <= np.flatnonzero(weights >= np.finfo(np.float32).tiny)[0]


def test_rounding_of_long_sums_draws_no_token_without_weight() -> None:
    """XLA's parallel prefix sums are not quite monotone: they rise and fall at zero weights too.

    Uniforms are aimed at those places; a vocabulary of 2,004 blocks has some in most rows.
    """
    rng = np.random.default_rng(1)
    rows, blocks = 64, 2004
    sums = (rng.random((rows, blocks)) * (rng.random((rows, blocks)) < 0.3)).astype(np.float32)
    sums[np.arange(blocks) >= rng.integers(blocks // 2, blocks, (rows, 1))] = 0
    cumulative = np.asarray(jax.jit(functools.partial(jax.numpy.cumsum, axis=-1))(sums))
    before = np.maximum.accumulate(cumulative, -1)[:, :-1]
    rises = (cumulative[:, 1:] > before) & (sums[:, 1:] == 0)
    place = 1 + rises.argmax(-1)
    aimed = before[np.arange(rows), place - 1] / cumulative[:, -1]
    below_one = np.full(rows, np.nextafter(np.float32(1), np.float32(0)))
    weights = np.zeros((rows, blocks, 64), np.float32)
    weights[:, :, 9] = sums
    weights = weights.reshape(rows, -1)
    for first in (aimed, np.nextafter(aimed, np.float32(1)), below_one):
        drawn = inverse(weights, np.stack([first, below_one], 1))
        assert (weights[np.arange(rows), drawn] > 0).all()


# Whole rows


def mixed() -> list[Slot]:
    """Greedy and sampled rows of every kind."""
    return [
        Slot(params(temperature=0, logprobs=3)),
        Slot(params(temperature=1.35, top_k=7, logprobs=5), seed=1),
        Slot(params(temperature=0.7, top_p=0.5), seed=2),
        Slot(params(top_k=1)),
        Slot(params(temperature=0, repetition_penalty=1.3, logit_bias={3: 2.0}), output=(9, 9)),
        Slot(params(presence_penalty=1.0, min_p=0.02, logprobs=0), seed=-5, output=(8,)),
        Slot(params(temperature=0.8, allowed_token_ids=[5, 80, 150]), seed=2**64 - 1),
        Slot(params(temperature=1.7), seed=2**40, sample_index=3),
    ]


def columns(sampled: Any, row: int) -> list[bytes]:
    return [np.asarray(part)[row].tobytes() for part in sampled]


@pytest.mark.parametrize("seed", range(3))
def test_not_a_bit_of_a_row_depends_on_the_others(seed: int) -> None:
    """Alone, in another place, and among other rows; also beside rows that are not numbers.

    Only the columns of log-probabilities are filled for the whole batch if one row asks.
    """
    rng = np.random.default_rng(seed)
    slots, logits = mixed(), normal(seed, ROWS, VOCAB)
    logits[4] = np.round(logits[4])  # ties
    carry = carry_of(slots)
    positions = np.array([slot.position for slot in slots]) + seed
    together = run_sample(logits, carry, positions)
    assert together.token[0] == logits[0].argmax()
    assert together.token[3] == logits[3].argmax()
    for step in range(8):
        order = rng.permutation(ROWS)
        want = run_sample(logits, carry, positions + step)
        moved = run_sample(logits[order], carry, positions[order] + step, rows=order.tolist())
        for place, row in enumerate(order):
            assert columns(moved, place) == columns(want, int(row))
    for row in range(ROWS):
        reports = slots[row].params.logprobs is not None
        shown = None if reports else 2
        for fill in (0.0, np.nan, np.inf):
            lonely = np.full_like(logits, fill)
            lonely[row] = logits[row]
            active = np.arange(ROWS) == row
            alone = run_sample(lonely, carry, positions, active=active.tolist())
            assert columns(alone, row)[:shown] == columns(together, row)[:shown]
            beside = run_sample(lonely, carry, positions)
            assert columns(beside, row) == columns(together, row)


def test_a_row_that_is_not_finite_is_reported_and_only_it() -> None:
    logits = normal(0, ROWS, VOCAB)
    logits[1, 5], logits[2, 5], logits[3] = np.nan, np.inf, -np.inf
    logits[4, :100] = -np.inf
    sampled = run_sample(logits, carry_of(mixed()), [9] * ROWS)
    assert sampled.finite.tolist() == [True, False, False, False, True, True, True, True]


def test_rows_that_are_not_active_do_not_widen_the_step() -> None:
    """Log-probabilities are computed where an active row asks for them, and nowhere else."""
    logits, carry = normal(0, ROWS, VOCAB), carry_of(mixed())
    quiet = [slot.params.logprobs is None for slot in mixed()]
    sampled = run_sample(logits, carry, [9] * ROWS, active=quiet)
    assert not sampled.rank.any()
    assert not sampled.top_logprobs.any()
    assert run_sample(logits, carry, [9] * ROWS).rank.all()


def test_logprobs_are_the_models_own() -> None:
    """Before penalties, bias, temperature and filters, of the token that was drawn."""
    ask = params(temperature=3.0, top_k=50, logprobs=5, logit_bias={3: 5.0}, repetition_penalty=2.0)
    logits = normal(1, ROWS, VOCAB)
    sampled = run_sample(logits, carry_of([Slot(ask, seed=i) for i in range(ROWS)]), [9] * ROWS)
    want = stats_log_softmax(logits)
    mine = want[np.arange(ROWS), sampled.token]
    np.testing.assert_allclose(sampled.logprob, mine, rtol=1e-5, atol=1e-5)
    assert np.array_equal(sampled.rank, 1 + (want > mine[:, None]).sum(-1))
    assert np.array_equal(sampled.top_ids, np.argsort(-logits, -1)[:, :NUM_TOP])


def test_slots_that_nobody_has_set_are_greedy() -> None:
    logits = normal(0, ROWS, VOCAB)
    sampled = run_sample(logits, zeros(), [0] * ROWS)
    assert np.array_equal(sampled.token, logits.argmax(-1))


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("temperature", [1e-29, 1e-12, 1e-6, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy_and_finite(
    temperature: float, scale: float, half: bool
) -> None:
    """On rows whose two best are apart, with every filter on and off, beside warm rows."""
    logits = np.random.default_rng(0).uniform(-scale, scale, (ROWS, VOCAB)).astype(np.float32)
    logits[np.arange(ROWS), np.arange(ROWS) * 25] = 1.1 * scale
    if half:
        logits = logits.astype(jax.numpy.bfloat16).astype(np.float32)
    assert (np.diff(np.sort(logits, -1)[:, -2:]) > 0.05 * scale).all()
    extras: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
    cold = [Slot(params(temperature=temperature, **e), seed=i) for i, e in enumerate(extras)]
    warm = [Slot(params(temperature=t), seed=1) for t in (0.0, 1.0, 1.5, 2e3)]
    carry = carry_of([*cold, *warm])
    for position in range(4, 9):
        sampled = run_sample(logits, carry, [position] * ROWS)
        assert sampled.finite.all()
        assert np.array_equal(sampled.token[:4], logits[:4].argmax(-1))
        assert (sampled.token < VOCAB).all()


def test_top_k_at_and_beyond_the_vocabulary_is_off() -> None:
    ks = [0, -1, VOCAB, VOCAB + 1, 9_999_999]
    logits = normal(0, VOCAB, scale=1.0)
    drawn = draw(logits, [Slot(params(top_k=k), seed=7) for k in ks], 40)
    assert (drawn == drawn[0]).all()
    assert len(set(drawn[0])) > 10
    one = draw(logits, [Slot(params(top_k=1), seed=7)], 3)
    assert (one == logits.argmax()).all()


@pytest.mark.parametrize("p", [0.0, 1e-46, 1e-9, 1e-4])
def test_a_tiny_top_p_is_greedy(p: float) -> None:
    logits = normal(0, VOCAB)
    assert (
        draw(logits, [Slot(params(top_p=p), seed=s) for s in range(8)], 5) == logits.argmax()
    ).all()


def test_seed_sample_and_position_decide_the_draw_and_nothing_else() -> None:
    logits = np.zeros(VOCAB, np.float32)
    slots = [
        Slot(params(), seed=42),
        Slot(params(), seed=42, prompt=(9,), output=(8, 8)),  # in another slot
        Slot(params(), seed=43),
        Slot(params(), seed=42 + 2**32),
        Slot(params(), seed=42 + 2**63),
        Slot(params(), seed=42, sample_index=1),
        Slot(params(), seed=-1),
        Slot(params(), seed=2**64 - 1),
    ]
    drawn = draw(logits, slots, 64)
    assert np.array_equal(drawn[0], drawn[1])
    assert np.array_equal(drawn[6], drawn[7])  # the same 64 bits
    # Two streams of uniform draws agree in more than 10 of 64 places with probability 1e-13.
    distinct = [0, 2, 3, 4, 5, 6]
    for i, a in enumerate(distinct):
        for b in distinct[i + 1 :]:
            assert (drawn[a] == drawn[b]).sum() <= 10
        assert (drawn[a][1:] == drawn[a][:-1]).sum() <= 10
    later = draw(logits, slots, 32, first=32)
    assert np.array_equal(later, drawn[:, 32:])


def test_whole_rows_follow_their_distributions() -> None:
    """Chi-square of 1,500 draws of each of 8 rows; see `FALSE_ALARM`."""
    logits = normal(5, VOCAB, scale=2.5)
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"allowed_token_ids": [1, 2, 3, 5, 8, 13], "logit_bias": {5: 2.0}},
    ]
    drawn = draw(logits, [Slot(params(**a), seed=i) for i, a in enumerate(asked)], 1500)
    for row, ask in zip(drawn, asked, strict=True):
        wide = logits.astype(np.float64)
        for token, value in ask.get("logit_bias", {}).items():
            wide[token] += value
        if "allowed_token_ids" in ask:
            wide[np.setdiff1d(np.arange(VOCAB), ask["allowed_token_ids"])] = -np.inf
        scaled = ((wide - wide.max()) / ask.get("temperature", 1.0)).astype(np.float32)
        k, p, m = ask.get("top_k", VOCAB), ask.get("top_p", 1.0), ask.get("min_p", 0.0)
        weights = np.where(kept_by_sorting(scaled, k, p, m), np.exp(scaled.astype(float)), 0)
        counts = np.bincount(row, minlength=VOCAB)
        assert not counts[weights == 0].any()
        assert chi_square(counts, weights / weights.sum()) > FALSE_ALARM

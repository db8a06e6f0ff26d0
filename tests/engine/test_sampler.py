"""Whole rows through the sampler: what each asked for, and what its result must not depend on
(B10, B12, B14, B15, B16, B22)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.sampler import sample
from jaxserve.sampling_params import SamplingParams
from tests.engine.distributions import FALSE_ALARM, chi_square, kept_weights, log_softmax, normal
from tests.engine.slots import NUM_SLOTS, NUM_TOP, VOCAB, Slot, carry_of, draw, run_sample, zeros

ROWS = NUM_SLOTS


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **fields})


def mixed() -> list[Slot]:
    """Greedy and sampled rows of every kind."""
    return [
        Slot(params(temperature=0, logprobs=3)),
        Slot(params(temperature=1.35, top_k=7, logprobs=5), seed=1),
        Slot(params(temperature=0.7, top_p=0.5), seed=2),
        Slot(params(top_k=1)),
        Slot(params(temperature=0, repetition_penalty=1.3, logit_bias={3: 2.0}), output=(9, 9)),
        Slot(params(presence_penalty=1.0, min_p=0.02, top_k=90, logprobs=0), seed=-5, output=(8,)),
        Slot(params(temperature=0.8, allowed_token_ids=[5, 80, 150]), seed=2**64 - 1),
        Slot(params(temperature=1.7), seed=2**40, sample_index=3),
    ]


GOLDEN = [
    [121, 126, 39, 2, 126, 83, 39, 126],
    [126, 39, 126, 179, 1, 126, 126, 59],
    [59, 15, 126, 15, 39, 59, 126, 179],
    [126, 126, 54, 59, 59, 188, 188, 126],
    [126, 157, 111, 55, 59, 111, 15, 111],
    [126, 132, 126, 39, 126, 132, 132, 15],
    [45, 56, 84, 17, 67, 126, 59, 84],
    [126, 126, 126, 126, 126, 126, 126, 126],
]
"""Tokens of `test_seeded_tokens_stay_what_they_are`."""


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


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16, 64])
def test_not_a_bit_of_a_row_depends_on_the_number_of_rows(rows: int) -> None:
    """Rows from the batch of 8, in smaller and larger batches that ask for the same."""
    slots = np.arange(rows) % ROWS
    logits, carry = normal(7, ROWS, VOCAB), carry_of(mixed())
    want = run_sample(logits, carry, [9] * ROWS)
    got = run_sample(logits[slots], carry, [9] * rows, rows=slots.tolist())
    for row, slot in enumerate(slots):
        assert columns(got, row)[:2] == columns(want, int(slot))[:2]
        if mixed()[slot].params.logprobs is not None:
            assert columns(got, row) == columns(want, int(slot))


@pytest.mark.parametrize("other", [{"top_k": 90}, {"top_p": 0.999, "temperature": 2.0}, {}])
def test_a_neighbour_that_takes_the_long_way_changes_nothing(other: dict[str, Any]) -> None:
    """A row whose filters are settled at once, beside rows that need bisection or more draws."""
    mine = [{"top_k": 1}, {"top_k": 5}, {"top_k": 40, "top_p": 0.8}, {"top_p": 0.2}, {"min_p": 0.3}]
    slots = [Slot(params(**ask), seed=i) for i, ask in enumerate(mine)]
    logits = normal(8, VOCAB, scale=2.0)
    want = draw(logits, slots, 60)
    among = draw(logits, [*slots, *(Slot(params(**other), seed=i) for i in range(3))], 60)
    assert np.array_equal(among[: len(slots)], want)
    alone = np.concatenate([draw(logits, [slot], 60) for slot in slots])
    assert np.array_equal(alone, want)


def test_a_greedy_step_has_no_logits_and_any_other_has() -> None:
    """Which of the two callables gave the result shows in it."""
    logits = normal(0, ROWS, VOCAB)
    largest = np.where(np.arange(ROWS) == 2, np.nan, np.float32(1))
    largest[4] = np.inf

    @functools.partial(jax.jit, static_argnames="poison")
    def run(carry: Any, active: Any, poison: str) -> Any:
        rows = jax.numpy.arange(ROWS)
        values = jax.numpy.full_like(logits, np.nan) if poison == "logits" else logits
        token = jax.numpy.full(ROWS, 77 if poison == "logits" else -1)
        return sample(
            lambda: values, lambda _: (token, largest), carry, rows, rows + 9, active, NUM_TOP
        )

    slots = mixed()
    only_greedy = np.array([False] * ROWS)
    quiet = carry_of([Slot(params(temperature=0))] * ROWS)
    for carry, active in ((quiet, ~only_greedy), (carry_of(slots), only_greedy)):
        sampled = run(carry, active, poison="logits")
        assert sampled.token.tolist() == [77] * ROWS
        assert sampled.finite.tolist() == [True, True, False, True, False, True, True, True]
        assert not sampled.rank.any()
    for row in (0, 1, 4):  # log-probabilities, a draw, an adjustment
        one = np.arange(ROWS) == row
        sampled = run(carry_of(slots), one, poison="greedy")
        assert 0 <= sampled.token[row] < VOCAB
        assert sampled.finite.all()


def test_seeded_tokens_stay_what_they_are() -> None:
    """Recorded: a change here changes what every seeded request answers."""
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6},
        {"top_k": 6},
        {"top_k": 90},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.8, "top_k": 90, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0},
    ]
    slots = [Slot(params(**ask), seed=11 * i) for i, ask in enumerate(asked)]
    assert draw(normal(12, VOCAB, scale=2.0), slots, 8, first=4).tolist() == GOLDEN


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
    want = log_softmax(logits)
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


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_numbers_end_with_an_id(fill: float) -> None:
    """With every filter; no loop waits for a token that such a row cannot have."""
    logits = np.full((ROWS, VOCAB), fill, np.float32)
    logits[::2, 100:] = 1.0
    asked: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"top_k": 5}, {"top_k": 90, "top_p": 0.1}]
    sampled = run_sample(logits, carry_of([Slot(params(**ask)) for ask in asked * 2]), [4] * ROWS)
    assert ((sampled.token >= 0) & (sampled.token < VOCAB)).all()
    assert sampled.finite.tolist() == np.isfinite(logits.max(-1)).tolist()


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
        {"temperature": 1.8, "top_k": 90, "top_p": 0.9, "min_p": 0.02},
        {"allowed_token_ids": [1, 2, 3, 5, 8, 13], "logit_bias": {5: 2.0}},
    ]
    drawn = draw(logits, [Slot(params(**a), seed=i) for i, a in enumerate(asked)], 1500)
    for row, ask in zip(drawn, asked, strict=True):
        wide = logits.astype(np.float64)
        for token, value in ask.get("logit_bias", {}).items():
            wide[token] += value
        if "allowed_token_ids" in ask:
            wide[np.setdiff1d(np.arange(VOCAB), ask["allowed_token_ids"])] = -np.inf
        filters = {k: v for k, v in ask.items() if k in {"temperature", "top_k", "top_p", "min_p"}}
        weights = kept_weights(wide.astype(np.float32), **filters)
        counts = np.bincount(row, minlength=VOCAB)
        assert not counts[weights == 0].any()
        assert chi_square(counts, weights) > FALSE_ALARM

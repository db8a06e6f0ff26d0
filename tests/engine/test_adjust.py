"""Penalties, bias, allowed ids and held-back end tokens, number by number (B17, B18, B19)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.sampling_params import SamplingParams
from tests.engine.slots import VOCAB, Slot, run_adjust

LOGITS = np.random.default_rng(0).normal(0, 4, VOCAB).astype(np.float32)
PROMPT, OUTPUT = (7, 7, 7, 9, 150), (9, 20, 20, 20, 199)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, **fields})


def adjusted(*slots: Slot) -> np.ndarray:
    """Row `i` for slot `i`, all from the same logits."""
    return run_adjust(np.stack([LOGITS] * len(slots)), slots)


def formula(slot: Slot) -> np.ndarray:
    """The same in float64, token by token."""
    asked = slot.params
    out = LOGITS.astype(np.float64)
    for token in range(VOCAB):
        count = list(slot.output).count(token)
        if count or token in slot.prompt:
            positive = out[token] > 0
            factor = asked.repetition_penalty
            out[token] = out[token] / factor if positive else out[token] * factor
        out[token] -= asked.frequency_penalty * count + asked.presence_penalty * (count > 0)
        out[token] += (asked.logit_bias or {}).get(token, 0)
        if asked.allowed_token_ids is not None and token not in asked.allowed_token_ids:
            out[token] = -np.inf
        if len(slot.output) < asked.min_tokens and token in slot.end_ids:
            out[token] = -np.inf
    return out


EACH = {
    "nothing": {},
    "presence": {"presence_penalty": 2.0},
    "negative-presence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.5},
    "repetition-below-1": {"repetition_penalty": 0.5},
    "bias": {"logit_bias": {0: 3.5, 20: -100.0, 199: 100.0, 64: -0.25}},
    "allowed": {"allowed_token_ids": [0, 31, 32, 63, 64, 199]},
    "min-tokens": {"min_tokens": 6},
    "all": {
        "presence_penalty": 1.0,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {9: 5.0, 3: -5.0},
        "allowed_token_ids": list(range(0, 200, 3)),
        "min_tokens": 8,
    },
}


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("name", EACH)
def test_equals_the_formula(name: str, place: int) -> None:
    """Among rows that ask for everything, which must not leak into it."""
    mine = Slot(params(**EACH[name]), prompt=PROMPT, output=OUTPUT, end_ids=frozenset({7, 198}))
    other = Slot(params(**EACH["all"]), prompt=(5, 6), output=(6, 8), end_ids=frozenset({1}))
    slots = [other] * 8
    slots[place] = mine
    got = adjusted(*slots)
    np.testing.assert_allclose(got[place], formula(mine), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got[place - 1], formula(other), rtol=1e-6, atol=1e-6)


def test_a_row_that_asks_for_nothing_keeps_its_bits() -> None:
    other = Slot(params(**EACH["all"]), output=(1, 1, 2))
    got = adjusted(*[other, Slot(params(), prompt=PROMPT, output=OUTPUT)] * 4)
    assert np.array_equal(got[1].view(np.int32), LOGITS.view(np.int32))


@pytest.mark.parametrize("name", ["presence", "frequency"])
def test_output_penalties_do_not_count_the_prompt(name: str) -> None:
    slot = Slot(params(**EACH[name]), prompt=(11,) * 20)
    assert np.array_equal(adjusted(slot)[0], LOGITS)


def test_the_repetition_penalty_counts_prompt_and_output_once() -> None:
    once = Slot(params(repetition_penalty=1.5), prompt=(11, 12), output=(13,))
    often = Slot(params(repetition_penalty=1.5), prompt=(11, 12, 12, 11), output=(13, 13, 11))
    got = adjusted(once, often)
    assert np.array_equal(got[0], got[1])
    assert np.flatnonzero(got[0] != LOGITS).tolist() == [11, 12, 13]
    assert (LOGITS[[11, 12, 13]] > 0).any()
    assert (LOGITS[[11, 12, 13]] < 0).any()


def test_penalties_grow_with_every_output_token() -> None:
    slots = [
        Slot(params(frequency_penalty=0.5, presence_penalty=1.0), output=(42,) * k)
        for k in range(8)
    ]
    got = adjusted(*slots)[:, 42]
    want = [LOGITS[42] - 0.5 * k - 1.0 * (k > 0) for k in range(8)]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_end_tokens_are_held_back_up_to_min_tokens_and_no_longer() -> None:
    ends = frozenset({2, 7, 199})
    slots = [
        Slot(params(min_tokens=3), prompt=PROMPT, output=(5,) * k, end_ids=ends) for k in range(6)
    ]
    got = np.isneginf(adjusted(*slots))
    assert [np.flatnonzero(row).tolist() for row in got] == [[2, 7, 199]] * 3 + [[]] * 3


def test_bias_on_as_many_ids_as_fit() -> None:
    bias = {token: float(token % 7 - 3) for token in range(VOCAB)}
    got = adjusted(Slot(params(logit_bias=bias)))[0]
    np.testing.assert_allclose(got, LOGITS + np.array(list(bias.values()), np.float32), rtol=1e-6)


def test_bias_does_not_bring_back_what_is_not_allowed() -> None:
    slot = Slot(
        params(logit_bias={5: 100.0, 6: 100.0}, allowed_token_ids=[6, 8], min_tokens=1),
        end_ids=frozenset({6}),
    )
    assert np.flatnonzero(np.isfinite(adjusted(slot)[0])).tolist() == [8]


def test_minus_infinity_stays() -> None:
    """A model may ban tokens itself; no penalty makes a NaN of that."""
    logits = LOGITS.copy()
    logits[[7, 9, 20]] = -np.inf
    slot = Slot(params(**EACH["all"]), prompt=PROMPT, output=OUTPUT)
    got = run_adjust(logits[None], [slot])[0]
    assert np.isneginf(got[[7, 9, 20]]).all()
    assert not np.isnan(got).any()

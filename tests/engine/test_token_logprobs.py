"""Log-probabilities and ranks against NumPy, and their bits in batches of every size."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxserve.sampling.logprobs import token_logprobs
from tests.engine.distributions import log_softmax, normal, tied

NUM_TOP = 5


@pytest.mark.parametrize("vocab", [200, 4096, 5003])
def test_equal_to_float64(vocab: int) -> None:
    logits = np.concatenate([normal(0, 4, vocab), tied(4, vocab, 0)])
    logits[0] *= 1e3
    token = np.array([5, 0, 199, 64, 7, vocab - 1, 100, vocab - 1], np.int32)
    compiled = jax.jit(functools.partial(token_logprobs, num_top=NUM_TOP))
    logprob, rank, ids, top = map(np.asarray, compiled(logits, token))
    want = log_softmax(logits)
    rows = np.arange(len(logits))
    np.testing.assert_allclose(logprob, want[rows, token], rtol=1e-5, atol=1e-5)
    assert np.array_equal(rank, 1 + (logits > logits[rows, token][:, None]).sum(-1))
    assert np.array_equal(ids, np.argsort(-logits, -1, kind="stable")[:, :NUM_TOP])
    np.testing.assert_allclose(top, np.take_along_axis(want, ids, 1), rtol=1e-5, atol=1e-5)
    assert (np.exp(top.astype(np.float64)).sum(-1) <= 1 + 1e-5).all()


@pytest.mark.parametrize("vocab", [77, 200, 5003])
def test_not_a_bit_depends_on_the_number_of_rows(vocab: int) -> None:
    """Small rows too, where XLA's own sums do."""
    compiled = jax.jit(functools.partial(token_logprobs, num_top=NUM_TOP))
    logits = normal(2, 64, vocab)
    token = (np.arange(64) * 5 % vocab).astype(np.int32)
    want = [np.asarray(part) for part in compiled(logits, token)]
    for rows in (1, 2, 3, 5, 8, 16, 31, 48):
        got = [np.asarray(part) for part in compiled(logits[:rows], token[:rows])]
        for part, whole in zip(got, want, strict=True):
            assert part.tobytes() == whole[:rows].tobytes(), f"{rows} rows"

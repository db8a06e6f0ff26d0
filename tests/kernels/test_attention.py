"""Attention over pages against the NumPy oracle, and what it must not depend on (B02, B07, B08)."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from pallas_kernels import reference
from tests.kernels.paged import (
    BLOCK_Q,
    CHUNK_CPU,
    CHUNK_ROWS,
    DECODE_CPU,
    DECODE_GPU,
    FORMS,
    NUM_SEQS,
    Array,
    Case,
    Config,
    Form,
    attend,
    error,
    expected,
    make_case,
    same_bits,
)

# Compilation is all that a case costs: only two configurations are compiled as for production.
WINDOWED = Config(12, 4, 80, 8, "float32", window=11, soft_cap=1.5)
HALF = Config(9, 3, 64, 16, "bfloat16")  # the attention of SmolLM2-135M
PLAIN = Config(14, 2, 64, 16, "float32", quick=True)
INVARIANT = [WINDOWED, HALF, PLAIN]
QUICK = [
    PLAIN,
    Config(1, 1, 32, 8, "float32", quick=True),
    Config(1, 1, 128, 16, "bfloat16", soft_cap=3.0, quick=True),
    Config(4, 4, 80, 16, "float32", window=16, quick=True),
    Config(4, 4, 64, 8, "bfloat16", quick=True),
    Config(8, 1, 128, 64, "float32", soft_cap=2.0, quick=True),
    Config(8, 1, 32, 16, "bfloat16", window=17, quick=True),
    Config(32, 1, 64, 8, "float32", window=1, quick=True),
    Config(32, 1, 80, 64, "bfloat16", quick=True),
    Config(14, 2, 128, 8, "bfloat16", window=7, soft_cap=5.0, quick=True),
    Config(9, 3, 64, 64, "float32", window=70, quick=True),
    Config(12, 4, 128, 64, "bfloat16", window=100, quick=True),
]


def forms(config: Config) -> list[Form]:
    """All that differ: chunks of float32 are the same program on every platform."""
    return FORMS if config.dtype == "bfloat16" and not config.quick else FORMS[:3]


def pairs(configs: list[Config]) -> pytest.MarkDecorator:
    each = [(config, form) for config in configs for form in forms(config)]
    return pytest.mark.parametrize(("config", "form"), each, ids=str)


def decode_lengths(config: Config) -> list[list[int]]:
    """Key counts of one-row sequences: all borders of a page, and random ones with holes."""
    ps, rng = config.page_size, np.random.default_rng(config.head_dim)
    edges = [0, 1, ps - 1, ps, ps + 1, 2 * ps, 3 * ps + 2, config.longest]
    random = rng.integers(0, config.longest + 1, NUM_SEQS)
    random[rng.permutation(NUM_SEQS)[:2]] = 0
    return [edges, random.tolist(), [0] * 7 + [1], [0] * NUM_SEQS]


def chunk_lengths(config: Config) -> list[tuple[list[int], list[int]]]:
    """Keys and queries of sequences whose last query block reaches over the next one's rows."""
    ps, rng = config.page_size, np.random.default_rng(config.head_dim)
    q_lens = [5, 0, 1, 17, 8, 3, 0, 9]
    contexts = [0, 0, 0, ps - 1, ps, 2 * ps + 1, 0, 3]
    kv_lens = [q and q + c for q, c in zip(q_lens, contexts, strict=True)]
    chosen = [(kv_lens, q_lens)]
    chosen.append(([0, config.longest, 0, 0, 16, 0, 0, 0], [0, 32, 0, 0, 16, 0, 0, 0]))
    chosen.append(([0] * NUM_SEQS, [0] * NUM_SEQS))
    for _ in range(2):
        share = np.where(rng.random(NUM_SEQS) < 0.3, 0, 1 / NUM_SEQS)
        queries = rng.multinomial(CHUNK_ROWS, [*share, max(0, 1 - share.sum())])[:NUM_SEQS]
        queries = np.minimum(queries, config.longest)
        keys = [int(rng.integers(n, config.longest + 1)) if n else 0 for n in queries]
        chosen.append((keys, queries.tolist()))
    return chosen


def decode_case(config: Config, kv_lens: list[int], seed: int = 0) -> Case:
    return make_case(config, kv_lens, [1] * NUM_SEQS, NUM_SEQS, seed)


@functools.cache
def answers(config: Config, split: bool) -> list[tuple[Case, Array]]:
    """Cases of a form with the oracle's answers."""
    return [(case, expected(config, case)) for case in cases(config, split)]


@functools.cache
def cases(config: Config, split: bool) -> list[Case]:
    if not split:
        return [
            make_case(config, kv_lens, q_lens, CHUNK_ROWS, seed)
            for seed, (kv_lens, q_lens) in enumerate(chunk_lengths(config))
        ]
    chosen = [decode_case(config, kv, seed) for seed, kv in enumerate(decode_lengths(config))]
    # Several rows of a sequence, as in speculative decoding, and sequences without any.
    ps = config.page_size
    several = [ps + 1, 0, 2, 2 * ps, ps, 9, 0, 0], [3, 0, 2, 1, 0, 1, 0, 0]
    return [*chosen, make_case(config, *several, NUM_SEQS)]


def test_the_oracle_itself() -> None:
    """Two keys of logits 0 and ln 3 weigh 1/4 and 3/4; the first token sees its own key only."""
    k = np.zeros((2, 1, 2, 1))
    k[1, 0, 1, 0] = np.log(3)
    v = np.zeros((2, 1, 2, 1))
    v[1, 0, :, 0] = 8, 16
    out = reference.attention(
        np.ones((3, 1, 1)),
        k,
        v,
        np.array([[0], [1]]),
        np.array([0, 2]),
        np.array([0, 1, 3]),
        sm_scale=1.0,
    )
    np.testing.assert_allclose(out[:, 0, 0], [0, 8, 0.25 * 8 + 0.75 * 16])


@pairs([WINDOWED, HALF, *QUICK])
def test_equals_the_oracle(config: Config, form: Form) -> None:
    for case, want in answers(config, form.split):
        got = attend(config, form, case, poison=np.nan)
        assert error(got, want) < config.tolerance
        active = np.repeat(case.kv_lens > 0, case.q_lens)
        assert not got[len(active) :].any(), "padding rows are not zero"
        assert not got[: len(active)][~active].any(), "rows of inactive sequences are not zero"


@pairs(INVARIANT)
def test_not_a_bit_depends_on_cells_that_no_sequence_owns(config: Config, form: Form) -> None:
    for case in cases(config, form.split):
        clean = attend(config, form, case)
        for poison in (np.nan, 1e4):
            used = int(case.cu_q_lens[-1])
            q = case.q.copy()
            q[used:] = poison
            for row in np.flatnonzero(np.repeat(case.kv_lens == 0, case.q_lens)):
                q[row] = poison
            poisoned = replace(case, q=q)
            assert same_bits(attend(config, form, poisoned, poison=poison), clean), poison


@pairs(INVARIANT)
def test_not_a_bit_depends_on_which_pages_a_sequence_owns(config: Config, form: Form) -> None:
    for case in cases(config, form.split):
        one = attend(config, form, case, seed=1, poison=np.nan)
        assert same_bits(attend(config, form, case, seed=2, poison=np.nan), one)


@pairs(INVARIANT)
def test_not_a_bit_depends_on_the_neighbours(config: Config, form: Form) -> None:
    for case in cases(config, form.split)[:2]:
        together = attend(config, form, case)
        for seq in np.flatnonzero(case.kv_lens):
            for place in (int(seq), (int(seq) + 3) % NUM_SEQS):
                alone = case.alone(int(seq), place)
                got = attend(config, form, alone, seed=place, poison=np.nan)
                assert same_bits(got[alone.rows(place)], together[case.rows(int(seq))])


@pytest.mark.parametrize("config", INVARIANT, ids=str)
def test_one_shot_chunked_and_token_by_token(config: Config) -> None:
    """The keys of later tokens are not there yet when earlier ones are computed."""
    length = 2 * config.page_size + 5
    whole = make_case(config, [0, length], [0, length], CHUNK_ROWS)
    want = attend(config, CHUNK_CPU, whole, poison=np.nan)[:length]
    assert error(want, expected(config, whole)[:length]) < config.tolerance
    k, v = whole.k[1], whole.v[1]
    for size in (3, BLOCK_Q, config.page_size + 1):
        for start in range(0, length, size):
            end = min(start + size, length)
            q = np.zeros_like(whole.q)
            q[: end - start] = whole.q[start:end]
            piece = Case(q, (k[:0], k[:end]), (v[:0], v[:end]), (0, end - start))
            got = attend(config, CHUNK_CPU, piece.padded(), poison=np.nan)[: end - start]
            assert error(got, want[start:end]) < config.tolerance
    for form in (DECODE_CPU, DECODE_GPU):
        for start in range(0, length, NUM_SEQS):
            ends = range(start + 1, min(start + NUM_SEQS, length) + 1)
            q = np.zeros((NUM_SEQS, *whole.q.shape[1:]), whole.q.dtype)
            q[: len(ends)] = whole.q[start : start + len(ends)]
            prefixes = [k[:n] for n in ends], [v[:n] for n in ends]
            tokens = Case(q, *map(tuple, prefixes), (1,) * len(ends))
            got = attend(config, form, tokens.padded(), poison=np.nan)[: len(ends)]
            assert error(got, want[start : start + len(ends)]) < config.tolerance

"""What attention over pages must not depend on: poison, pages, places, neighbours, cuts (B02)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.paged import (
    BLOCK_Q,
    CHUNK_CPU,
    CHUNK_KERNEL,
    CHUNK_ROWS,
    DECODE_CPU,
    DECODE_GPU,
    DECODE_KERNEL,
    KERNELS,
    NUM_SEQS,
    REFERENCE,
    Array,
    Case,
    Config,
    Form,
    attend,
    error,
    make_case,
    random_case,
    same_bits,
)
from tests.kernels.test_attention import (
    EVERYWHERE,
    HALF,
    INT8,
    PLAIN,
    WINDOWED,
    cases,
    forms,
    named,
    poisoned,
)

INVARIANT = EVERYWHERE + [(PLAIN, form) for form in forms(PLAIN)]
SMALL = Config(4, 4, 64, 16, "float32", block_kv=32, quick=True)
"""Of the configurations that are compared with one another."""


def some_cases(config: Config, split: bool) -> list[Case]:
    """Those chosen by hand, and random ones of several rows per sequence."""
    rng = np.random.default_rng(2)
    return cases(config, split) + [random_case(config, split, rng) for _ in range(10)]


def check_poison(config: Config, form: Form, case: Case) -> None:
    clean = attend(config, form, case)
    for poison in (np.nan, 1e4):
        dirty = attend(config, form, poisoned(case, poison), poison=poison)
        assert same_bits(dirty, clean), f"depends on {poison} where no sequence is"


@named(INVARIANT)
def test_not_a_bit_depends_on_cells_that_no_sequence_owns(config: Config, form: Form) -> None:
    """Null page, free pages, page tails and their scales; query rows of nobody."""
    for case in some_cases(config, form.split):
        check_poison(config, form, case)


@named(INVARIANT)
def test_not_a_bit_depends_on_which_pages_a_sequence_owns(config: Config, form: Form) -> None:
    for case in some_cases(config, form.split):
        one = attend(config, form, case, seed=1, poison=np.nan)
        assert same_bits(attend(config, form, case, seed=2, poison=np.nan), one)


@named(INVARIANT)
def test_not_a_bit_depends_on_a_sequence_s_place(config: Config, form: Form) -> None:
    rng = np.random.default_rng(3)
    for case in some_cases(config, form.split):
        order = rng.permutation(NUM_SEQS).tolist()
        moved = case.in_order(order)
        before, after = (attend(config, form, c, poison=np.nan) for c in (case, moved))
        for place, seq in enumerate(order):
            assert same_bits(after[moved.rows(place)], before[case.rows(seq)])


@named(INVARIANT)
def test_not_a_bit_depends_on_the_neighbours(config: Config, form: Form) -> None:
    for case in [*cases(config, form.split)[:2], *some_cases(config, form.split)[-2:]]:
        together = attend(config, form, case)
        for seq in np.flatnonzero(case.kv_lens):
            for place in (int(seq), (int(seq) + 3) % NUM_SEQS):
                alone = case.alone(int(seq), place)
                got = attend(config, form, alone, seed=place, poison=np.nan)
                assert same_bits(got[alone.rows(place)], together[case.rows(int(seq))])


def prefixes(config: Config, case: Case, form: Form, ends: list[int], rows: int) -> Array:
    """Answers of the last `rows` tokens of prefixes of sequence 1, as sequences of one call."""
    num_rows = config.num_rows(form.split)
    q = np.zeros((num_rows, *case.q.shape[1:]), case.q.dtype)
    for i, end in enumerate(ends):
        q[i * rows : (i + 1) * rows] = case.q[case.rows(1)][end - rows : end]
    k, v = (tuple(x[1][:end] for end in ends) for x in (case.k, case.v))
    call = Case(q, k, v, (rows,) * len(ends)).padded()
    return attend(config, form, call, poison=np.nan)[: len(ends) * rows]


@pytest.mark.parametrize(
    ("config", "chunk", "decode"),
    [
        *[(c, CHUNK_CPU, [DECODE_CPU, DECODE_GPU]) for c in (WINDOWED, HALF, PLAIN)],
        *[(c, REFERENCE, []) for c in (WINDOWED, HALF)],
        *[(c, CHUNK_KERNEL, [DECODE_KERNEL]) for c in (WINDOWED, HALF, INT8)],
    ],
    ids=str,
)
def test_one_shot_equals_chunks_equals_token_by_token(
    config: Config, chunk: Form, decode: list[Form]
) -> None:
    """The keys of later tokens are not there yet when earlier ones are computed."""
    length = 2 * config.page_size + 5
    whole = make_case(config, [0, length], [0, length], CHUNK_ROWS)
    want = attend(config, chunk, whole, poison=np.nan)[:length]
    for size in (3, BLOCK_Q, config.page_size + 1):
        for start in range(0, length, size):
            end = min(start + size, length)
            got = prefixes(config, whole, chunk, [end], end - start)
            assert error(got, want[start:end]) < config.tolerance
    for form in decode:
        for start in range(0, length, NUM_SEQS):
            ends = list(range(start + 1, min(start + NUM_SEQS, length) + 1))
            got = prefixes(config, whole, form, ends, 1)
            assert error(got, want[start : start + len(ends)]) < config.tolerance


@named([(WINDOWED, form) for form in (DECODE_CPU, DECODE_GPU, DECODE_KERNEL)])
def test_several_rows_equal_as_many_decodes(config: Config, form: Form) -> None:
    """A sequence's k + 1 last tokens at once, as in speculative verification."""
    rows = config.decode_rows
    for length in (rows, config.page_size + 1, config.chunk_kv + 1, config.longest):
        whole = make_case(config, [0, length], [0, length], config.longest)
        at_once = prefixes(config, whole, form, [length], rows)
        single = prefixes(config, whole, form, list(range(length - rows + 1, length + 1)), 1)
        assert error(at_once, single) < config.tolerance


@pytest.mark.parametrize("form", [DECODE_CPU, CHUNK_CPU, REFERENCE, *KERNELS], ids=str)
def test_the_page_size_changes_nothing(form: Form) -> None:
    large = replace(SMALL, page_size=64)
    for case in some_cases(SMALL, form.split):
        one, other = (attend(config, form, case, poison=np.nan) for config in (SMALL, large))
        assert error(one, other) < SMALL.tolerance


@pytest.mark.parametrize("form", [DECODE_CPU, CHUNK_CPU, REFERENCE, *KERNELS], ids=str)
def test_a_window_no_shorter_than_any_sequence_is_none(form: Form) -> None:
    wide = replace(SMALL, window=SMALL.longest)
    for case in some_cases(SMALL, form.split):
        one, other = (attend(config, form, case, poison=np.nan) for config in (SMALL, wide))
        assert same_bits(one, other)


@pytest.mark.parametrize("form", [DECODE_CPU, CHUNK_CPU, REFERENCE, *KERNELS], ids=str)
@pytest.mark.parametrize("sink", [-np.inf, -1e30])
def test_a_sink_without_weight_is_none(form: Form, sink: float) -> None:
    with_sinks = replace(SMALL, sinks=True)
    for case in some_cases(SMALL, form.split):
        plain = attend(SMALL, form, case, poison=np.nan)
        sunk = attend(with_sinks, form, case, poison=np.nan, sink=sink)
        assert error(plain, sunk) < SMALL.tolerance
        assert same_bits(plain, sunk) or form not in KERNELS

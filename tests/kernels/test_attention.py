"""Attention over pages against the NumPy oracle, on every implementation (B07, B08)."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from pallas_kernels import reference
from tests.kernels.paged import (
    CHUNK_ROWS,
    FORMS,
    KERNELS,
    NUM_SEQS,
    REFERENCE,
    Array,
    Case,
    Config,
    Form,
    attend,
    build,
    error,
    expected,
    held,
    make_case,
    pages,
    random_case,
    same_bits,
    sinks,
)

# Compilation is all that a case costs XLA: only two configurations are compiled as for production.
WINDOWED = Config(12, 4, 80, 16, "float32", 11, 1.5, sinks=True, decode_rows=3, block_kv=16)
HALF = Config(9, 3, 64, 16, "bfloat16")  # the attention of SmolLM2-135M
PLAIN = Config(14, 2, 64, 16, "float32", quick=True)
INT8 = Config(8, 2, 64, 16, "bfloat16", quantized="int8", sinks=True)
FP8 = Config(4, 2, 96, 32, "bfloat16", 40, quantized="float8_e4m3fn", block_kv=32, decode_rows=2)
EIGHT_BIT = [INT8, FP8]
XLA = [
    WINDOWED,
    HALF,
    PLAIN,
    *[replace(config, quick=True) for config in EIGHT_BIT],
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
RATIOS = [(1, 1), (4, 4), (8, 1), (32, 1), (14, 2), (9, 3), (12, 4)]
KERNEL = [
    WINDOWED,
    HALF,
    INT8,
    FP8,
    Config(2, 1, 32, 128, "float16", soft_cap=4.0, block_kv=32),  # parts of a page
    Config(4, 2, 128, 64, "float32", 1, sinks=True, decode_rows=2),
    Config(3, 1, 256, 16, "bfloat16", 100, 50.0, sinks=True, decode_rows=4, block_kv=64),
    Config(6, 3, 80, 16, "float32", quantized="int8", soft_cap=3.0, block_kv=16),
    *[Config(*heads, 64, 16, "float32") for heads in RATIOS],
]
RANDOM_CASES = 200


def forms(config: Config) -> list[Form]:
    """All that differ: chunks of float32 are the same program on every platform."""
    return FORMS if config.dtype == "bfloat16" and not config.quick else FORMS[:3]


EVERYWHERE = [
    (config, form)
    for config in (WINDOWED, HALF, *EIGHT_BIT)
    for form in (*forms(replace(config, quick=config in EIGHT_BIT)), REFERENCE, *KERNELS)
]
"""What must hold of every implementation is shown with these."""


def named(pairs: list[tuple[Config, Form]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("config", "form"), pairs, ids=str)


def decode_lengths(config: Config) -> list[list[int]]:
    """Key counts of one-row sequences: all borders of a page, random ones with holes, all full.

    Full sequences need as many work items as there are.
    """
    ps, rng = config.page_size, np.random.default_rng(config.head_dim)
    edges = [0, 1, ps - 1, ps, ps + 1, 2 * ps, 3 * ps + 2, config.longest]
    random = rng.integers(0, config.longest + 1, NUM_SEQS)
    random[rng.permutation(NUM_SEQS)[:2]] = 0
    return [edges, random.tolist(), [0] * 7 + [1], [0] * NUM_SEQS, [config.longest] * NUM_SEQS]


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


@functools.cache
def cases(config: Config, split: bool) -> list[Case]:
    """The cases chosen by hand."""
    rows = config.num_rows(split)
    if not split:
        return [
            make_case(config, kv_lens, q_lens, rows, seed)
            for seed, (kv_lens, q_lens) in enumerate(chunk_lengths(config))
        ]
    chosen = [
        make_case(config, kv_lens, [1] * NUM_SEQS, rows, seed)
        for seed, kv_lens in enumerate(decode_lengths(config))
    ]
    # Several rows of a sequence, as in speculative decoding, and sequences without any.
    ps = config.page_size
    kv_lens, q_lens = [ps + 1, 0, 2, 2 * ps, ps, 9, 0, 0], [3, 0, 2, 1, 0, 1, 0, 0]
    q_lens = np.minimum(q_lens, config.decode_rows).tolist()
    return [*chosen, make_case(config, kv_lens, q_lens, rows)]


@functools.cache
def answers(config: Config, split: bool) -> list[tuple[Case, Array]]:
    """Cases chosen by hand with the oracle's answers."""
    return [(case, expected(config, case)) for case in cases(config, split)]


def poisoned(case: Case, poison: float) -> Case:
    """The case with poison in the query rows of no active sequence."""
    q = case.q.copy()
    q[~case.active_rows] = poison
    return replace(case, q=q)


def test_the_oracle_itself() -> None:
    """Two keys of logits 0 and ln 3 weigh 1/4 and 3/4; the first token sees its own key only."""
    k = np.zeros((2, 1, 2, 1))
    k[1, 0, 1, 0] = np.log(3)
    v = np.zeros((2, 1, 2, 1))
    v[1, 0, :, 0] = 8, 16
    tables, kv_lens, cu_q_lens = np.array([[0], [1]]), np.array([0, 2]), np.array([0, 1, 3])
    call = (np.ones((3, 1, 1)), k, v, tables, kv_lens, cu_q_lens)
    out = reference.attention(*call, sm_scale=1.0)
    np.testing.assert_allclose(out[:, 0, 0], [0, 8, 0.25 * 8 + 0.75 * 16])
    # A sink as heavy as the second key takes 3 shares of 7, and half of the first token.
    out = reference.attention(*call, sm_scale=1.0, sinks=np.log([3.0]))
    np.testing.assert_allclose(out[:, 0, 0], [0, 8 / 4, (8 + 3 * 16) / 7])


@pytest.mark.parametrize("config", [WINDOWED, HALF, PLAIN], ids=str)
@pytest.mark.parametrize("split", [True, False])
def test_the_quick_oracle_equals_the_literal_one(config: Config, split: bool) -> None:
    """It knows no pages; the literal one reads them as the kernels do."""
    for case, want in answers(config, split)[:2]:
        cells, tables = pages(config, case)
        literal = reference.attention(
            case.q,
            cells[:, 0],
            cells[:, 1],
            tables,
            case.kv_lens,
            case.cu_q_lens,
            sm_scale=config.head_dim**-0.5,
            window=config.window,
            soft_cap=config.soft_cap,
            sinks=sinks(config),
        )
        np.testing.assert_allclose(want, literal, rtol=0, atol=1e-12)


def check_equals_the_oracle(config: Config, form: Form, case: Case, want: Array) -> None:
    got = attend(config, form, case, poison=np.nan)
    assert error(got, want) < config.tolerance
    assert not got[~case.active_rows].any(), "rows of no active sequence are not zero"


@named(
    [(config, form) for config in XLA for form in forms(config)]
    + [(config, REFERENCE) for config in (WINDOWED, HALF, *EIGHT_BIT)]
    + [(config, form) for config in KERNEL for form in KERNELS]
)
def test_equals_the_oracle(config: Config, form: Form) -> None:
    for case, want in answers(config, form.split):
        check_equals_the_oracle(config, form, case, want)


@named([(config, form) for config in KERNEL for form in KERNELS])
def test_equals_the_oracle_for_any_lengths_tables_and_holes(config: Config, form: Form) -> None:
    rng = np.random.default_rng(0)
    empty = 0
    for _ in range(RANDOM_CASES):
        case = poisoned(random_case(config, form.split, rng), np.nan)
        check_equals_the_oracle(config, form, case, expected(config, case))
        empty += not case.active_rows.any()
    assert empty, "no case without any active sequence"


@named([(config, form) for config in (WINDOWED, HALF) for form in (REFERENCE, *KERNELS)])
def test_without_any_active_sequence_all_is_exactly_zero(config: Config, form: Form) -> None:
    rows = config.num_rows(form.split)
    for q_lens in ([0] * NUM_SEQS, [config.decode_rows] * NUM_SEQS):
        case = make_case(config, [0] * NUM_SEQS, q_lens, rows)
        got = attend(config, form, poisoned(case, np.nan), poison=np.nan)
        assert same_bits(got, np.zeros_like(got))


@named([(config, form) for config in (WINDOWED, HALF, INT8) for form in KERNELS])
def test_products_are_not_rounded_to_tf32(config: Config, form: Form) -> None:
    """No CPU would round them; the highest precision is what forbids a GPU to."""
    case = cases(config, form.split)[0]
    cells, tables = pages(config, case)
    lengths = (case.kv_lens, case.cu_q_lens)
    call = build(config, form).trace(  # type: ignore[attr-defined]
        case.q, held(config, form.platform, cells), tables, *lengths, sinks(config)
    )
    text = str(call.jaxpr)
    assert text.count(" dot_general[") == 2
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2
    assert text.count("preferred_element_type=float32") == 2

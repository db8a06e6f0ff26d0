"""The rules of decode attention, for the Mosaic GPU kernels in Pallas's interpreter.

Run by `test_interpreted`, in a process of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic_decode
from tests.kernels.mosaic.cases import (
    LONGEST,
    NUM_SEQS,
    Case,
    Config,
    attend,
    error,
    expected,
    make_case,
    same_bits,
)

TOLERANCE = 2e-2
"""Weights and results are rounded to 16 bits, bfloat16 to 2^-9 of numbers of size 1."""
SMOLLM2 = Config(9, 3, 64, 16)
WINDOW = Config(4, 1, 128, 64, window=100, num_stages=3)
SINKS = Config(4, 2, 64, 32, "float16", soft_cap=5.0, sinks=True)
ROWS = Config(6, 2, 64, 16, block_q=3, window=70, sinks=True)
WIDE = Config(12, 1, 128, 128, block_kv=128)
CONFIGS = (SMOLLM2, WINDOW, SINKS, ROWS, WIDE)
RATIOS = tuple(Config(*heads, 64, 16) for heads in ((1, 1), (8, 1), (32, 1), (14, 2)))
"""Head ratios that the others lack (B08)."""
RACES = Config(6, 2, 64, 16, block_q=2, sinks=True, detect_races=True)
FULL = [LONGEST, 0, LONGEST - 1, 1]
CASES = 10


@pytest.fixture
def _mutant() -> Iterator[None]:
    """Kernels are traced anew, before and after."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("config", [*CONFIGS, *RATIOS], ids=str)
def test_values_match_the_reference(config: Config) -> None:
    for seed in range(CASES):
        case = make_case(config, seed)
        assert error(attend(config, case), expected(config, case)) < TOLERANCE, case.kv_lens


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nothing_outside_a_sequence_reaches_it(config: Config) -> None:
    for seed in range(3):
        check_poison(config, make_case(config, seed))


def check_poison(config: Config, case: Case) -> None:
    """NaN outside all sequences changes no bit, compared with large numbers."""
    finite, nan = (attend(config, case.poisoned(poison)) for poison in (1e4, np.nan))
    assert same_bits(finite, nan)
    assert error(nan, expected(config, case)) < TOLERANCE


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_sequence_alone_gets_the_bits_it_gets_among_others(config: Config) -> None:
    case = make_case(config, 1, [LONGEST, 17, 0, 200])
    together = attend(config, case)
    for seq, place in ((0, 2), (3, 0)):
        rows = case.rows(seq)
        alone = attend(config, case.alone(seq, place))[: rows.stop - rows.start]
        assert same_bits(alone, together[rows])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_active_sequence_gives_zeros(config: Config) -> None:
    case = make_case(config, 0, [0] * NUM_SEQS).poisoned(np.nan)
    assert not attend(config, case).any()


def test_rows_of_one_sequence_are_as_many_decode_steps() -> None:
    one = dataclasses.replace(ROWS, block_q=1)
    lengths = np.array([130, 257, 64, LONGEST], np.int32)
    case = make_case(ROWS, 5, lengths.tolist())
    case = dataclasses.replace(case, q_lens=np.full(NUM_SEQS, ROWS.block_q, np.int32))
    together = attend(ROWS, case).reshape(NUM_SEQS, ROWS.block_q, ROWS.q_heads, ROWS.head_dim)
    ones = np.ones(NUM_SEQS, np.int32)
    for row in range(ROWS.block_q):
        q = case.q[row :: ROWS.block_q]
        kv_lens = lengths - (ROWS.block_q - 1 - row)
        step = dataclasses.replace(case, q=q, kv_lens=kv_lens, q_lens=ones)
        assert error(attend(one, step), together[:, row].astype(np.float64)) < TOLERANCE


def test_copies_and_reads_do_not_race(capsys: pytest.CaptureFixture[str]) -> None:
    case = make_case(RACES, 0, FULL)
    assert error(attend(RACES, case), expected(RACES, case)) < TOLERANCE
    assert "RACE" not in capsys.readouterr().out


def test_the_table_is_not_read_where_an_item_has_no_keys() -> None:
    """The interpreter takes pages past the cache; `cp.async` on a chip would fault."""
    table = jnp.array([[7, -1, 2**30, 8, 9, 2**30]])
    memory = SimpleNamespace(tables=table)
    item = SimpleNamespace(seq=0, lo=3 * 16 + 5, hi=5 * 16 - 2)
    sizes = SimpleNamespace(page_size=16, copy_rows=16)
    pages = [int(mosaic_decode._page(sizes, memory, item, 16 * i)) for i in range(9)]
    assert pages == [0, 0, 0, 8, 9, 0, 0, 0, 0]


@pytest.mark.usefixtures("_mutant")
def test_values_that_are_not_zeroed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mosaic_decode, "_zeroed", lambda values, keep: values)
    mutant = dataclasses.replace(SMOLLM2, sinks=True)
    with pytest.raises(AssertionError):
        check_poison(mutant, make_case(mutant, 0))


@pytest.mark.usefixtures("_mutant")
def test_a_missing_wait_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mosaic_decode.plgpu, "barrier_wait", lambda barrier: None)
    try:
        attend(RACES, make_case(RACES, 0, FULL))
        message = ""
    except Exception as failure:
        message = str(failure)
    assert "RACE" in message + capsys.readouterr().out

"""The work list equals its NumPy twin, covers every query-key pair once, and always fits."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import Plan, items_bound, make_plan, reference, split_items_bound
from tests.kernels.paged import quick_options

NUM_SEQS = 5
MAX_KEYS = 24
NUM_ITEMS = 1 + NUM_SEQS * MAX_KEYS * MAX_KEYS  # of blocks and chunks of one token
STATIC_ARGUMENTS = [
    (1, None, None),
    (4, None, None),
    (4, None, 1),
    (3, None, 5),
    (1, 1, None),
    (4, 8, None),
    (4, 8, 5),
    (3, 2, 1),
]

# (keys, queries) of a sequence; no keys means inactive, and then the queries must not count.
sequences = st.one_of(
    st.integers(1, MAX_KEYS).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))),
    st.tuples(st.just(0), st.integers(0, 3)),
)
batches = st.lists(sequences, min_size=NUM_SEQS, max_size=NUM_SEQS).map(
    lambda pairs: np.array(pairs, np.int32).T
)


@functools.cache
def compiled(
    block_q: int, chunk_kv: int | None, window: int | None, num_items: int = NUM_ITEMS
) -> Callable[..., Plan]:
    options = {"num_items": num_items, "block_q": block_q, "chunk_kv": chunk_kv, "window": window}
    return jax.jit(functools.partial(make_plan, **options), compiler_options=quick_options())


def items(plan: Plan) -> list[tuple[int, int, int, int]]:
    live = np.asarray(plan.seq) >= 0
    columns = (np.asarray(column)[live].tolist() for column in plan[:4])
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize(("block_q", "chunk_kv", "window"), STATIC_ARGUMENTS)
@settings(max_examples=40, deadline=None)
@given(lens=batches)
def test_equals_its_numpy_twin(
    block_q: int, chunk_kv: int | None, window: int | None, lens: np.ndarray
) -> None:
    kv_lens, q_lens = lens
    plan = compiled(block_q, chunk_kv, window)(kv_lens, q_lens)
    want = reference.plan(kv_lens, q_lens, block_q=block_q, chunk_kv=chunk_kv, window=window)
    assert items(plan) == want
    need, count = int(plan.need), np.asarray(plan.count)
    assert need == len(want) == count.sum()
    for s in range(NUM_SEQS):
        first = int(plan.start[s])
        assert [item[0] for item in want[first : first + count[s]]] == [s] * count[s]
    for column, dead in zip(plan[:4], (-1, 0, 0, 0), strict=True):
        assert (np.asarray(column)[need:] == dead).all()


@settings(max_examples=200, deadline=None)
@given(
    lens=batches,
    block_q=st.integers(1, 6),
    chunk_kv=st.none() | st.integers(1, 9),
    window=st.none() | st.integers(1, 9),
)
def test_every_query_meets_every_key_it_sees_once(
    lens: np.ndarray, block_q: int, chunk_kv: int | None, window: int | None
) -> None:
    kv_lens, q_lens = lens.tolist()
    plan = reference.plan(lens[0], lens[1], block_q=block_q, chunk_kv=chunk_kv, window=window)
    met = Counter(
        (s, position, key)
        for s, q0, lo, hi in plan
        for position in range(
            kv_lens[s] - q_lens[s] + q0, kv_lens[s] - q_lens[s] + min(q0 + block_q, q_lens[s])
        )
        for key in range(lo, hi)
        if key <= position and (window is None or key > position - window)
    )
    want = {
        (s, position, key)
        for s in range(NUM_SEQS)
        for position in range(kv_lens[s] - q_lens[s], kv_lens[s])
        if kv_lens[s]
        for key in range(0 if window is None else max(0, position - window + 1), position + 1)
    }
    assert met == Counter(want)


@settings(max_examples=200, deadline=None)
@given(q_lens=st.lists(st.integers(0, 40), min_size=1, max_size=8), block_q=st.integers(1, 9))
def test_the_bound_suffices(q_lens: list[int], block_q: int) -> None:
    lens = np.array(q_lens)
    need = len(reference.plan(lens, lens, block_q=block_q))
    assert need <= items_bound(sum(q_lens), len(q_lens), block_q)


@pytest.mark.parametrize("block_q", [1, 3, 8])
def test_the_bound_is_no_larger_than_it_must_be(block_q: int) -> None:
    """Every sequence but the first needs a block for its one row, the first one a row too many."""
    lens = np.array([4 * block_q + 1, *[1] * (block_q - 1)])
    need = len(reference.plan(lens, lens, block_q=block_q))
    assert need == 4 + block_q
    assert items_bound(int(lens.sum()), len(lens), block_q) == need + 1


def test_items_past_the_size_are_lost_and_nothing_else() -> None:
    lens = np.full(NUM_SEQS, 8, np.int32)
    short = compiled(4, None, None, num_items=3)(lens, lens)
    assert items(short) == items(compiled(4, None, None)(lens, lens))[:3]
    assert int(short.need) == 2 * NUM_SEQS


@pytest.mark.parametrize("block_q", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 2, 7, 8, 9, 16, 17])
def test_the_bound_of_split_items_is_the_most_that_any_length_needs(
    window: int | None, block_q: int
) -> None:
    """Sufficient for every length, and no larger than some length needs."""
    chunk_kv, longest = 8, 64
    most = 0
    for length in range(1, longest + 1):
        for queries in range(1, min(block_q, length) + 1):
            lens = np.array([length]), np.array([queries])
            items = reference.plan(*lens, block_q=block_q, chunk_kv=chunk_kv, window=window)
            most = max(most, len(items))
    assert most == split_items_bound(1, longest, chunk_kv, window, block_q)

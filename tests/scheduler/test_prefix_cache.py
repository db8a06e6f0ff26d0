"""Prefix reuse: only pages with exactly the same tokens before and in them are ever shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import BlockPool, PrefixCache, Sequence
from tests.scheduler.harness import Harness

PAGE = 4


def cached(cache: PrefixCache, pool: BlockPool, tokens: list[int], salt: bytes = b"") -> list[int]:
    """Pages of a sequence that has computed `tokens` and gone."""
    seq = Sequence("writer", tokens, 1, cache_salt=salt)
    seq.block_table = pool.allocate(pool.num_missing([], len(tokens)))
    cache.keep(seq, 0, len(tokens))
    pool.release(seq.block_table)
    return seq.block_table


def match(cache: PrefixCache, tokens: list[int], salt: bytes = b"") -> list[int]:
    return cache.match(Sequence("reader", tokens, 1, cache_salt=salt))


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(33, PAGE)


@pytest.fixture
def cache(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool)


@pytest.mark.parametrize(
    ("length", "num_pages"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_full_pages_match_and_one_token_is_left(
    cache: PrefixCache, pool: BlockPool, length: int, num_pages: int
) -> None:
    table = cached(cache, pool, list(range(length)))
    assert match(cache, list(range(length))) == table[:num_pages]


def test_an_empty_cache_has_nothing(cache: PrefixCache) -> None:
    assert match(cache, list(range(20))) == []


@pytest.mark.parametrize("position", range(2 * PAGE))
def test_one_different_token_ends_the_match_at_its_page(
    cache: PrefixCache, pool: BlockPool, position: int
) -> None:
    tokens = list(range(2 * PAGE + 1))
    table = cached(cache, pool, tokens)
    assert match(cache, tokens) == table[:2]
    tokens[position] = 99
    assert match(cache, tokens) == table[: position // PAGE]


def test_the_same_page_after_another_one_or_shifted_is_not_the_same(
    cache: PrefixCache, pool: BlockPool
) -> None:
    cached(cache, pool, [1, 1, 1, 1, 2, 2, 2, 2])
    assert match(cache, [2, 2, 2, 2, 9]) == []
    assert match(cache, [3, 3, 3, 3, 2, 2, 2, 2, 9]) == []
    assert match(cache, [1, 1, 1, 2, 2, 2, 2, 9]) == []


def test_another_salt_is_another_prefix(cache: PrefixCache, pool: BlockPool) -> None:
    tokens = list(range(9))
    plain = cached(cache, pool, tokens)
    salted = cached(cache, pool, tokens, b"adapter-1")
    assert match(cache, tokens) == plain[:2]
    assert match(cache, tokens, b"adapter-1") == salted[:2]
    assert match(cache, tokens, b"adapter-2") == []


def test_token_ids_of_any_size_are_told_apart(cache: PrefixCache, pool: BlockPool) -> None:
    table = cached(cache, pool, [2**31, 1, 0, 256])
    assert match(cache, [2**31, 1, 0, 256, 5]) == table
    assert match(cache, [2**31, 256, 0, 1, 5]) == []
    assert match(cache, [0, 1, 0, 256, 5]) == []


def test_only_pages_that_were_filled_are_kept(cache: PrefixCache, pool: BlockPool) -> None:
    tokens = list(range(3 * PAGE + 1))
    seq = Sequence("writer", tokens, 1)
    seq.block_table = pool.allocate(4)
    for start, end, num_kept in [(0, 3, 0), (3, 4, 1), (4, 7, 1), (7, 13, 3)]:
        cache.keep(seq, start, end)
        assert match(cache, tokens) == seq.block_table[:num_kept]


def test_a_later_page_is_of_no_use_without_the_earlier_one(
    cache: PrefixCache, pool: BlockPool
) -> None:
    tokens = list(range(2 * PAGE + 1))
    seq = Sequence("writer", tokens, 1)
    seq.block_table = pool.allocate(3)
    cache.keep(seq, PAGE, 2 * PAGE)
    assert match(cache, tokens) == []


def test_a_key_is_computed_once_and_serves_as_the_sequence_grows(
    cache: PrefixCache, pool: BlockPool
) -> None:
    table = cached(cache, pool, list(range(12)))
    seq = Sequence("reader", list(range(9)), 8)
    assert cache.match(seq) == table[:2]
    keys = list(seq.page_keys)
    seq.token_ids += [9, 10, 11, 12]
    assert cache.match(seq) == table[:3]
    assert seq.page_keys[:2] == keys
    assert len(seq.page_keys) == 3


tokens_lists = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(written=st.lists(tokens_lists, min_size=1, max_size=4), read=tokens_lists)
def test_the_match_is_the_longest_common_prefix_in_pages(
    written: list[list[int]], read: list[int]
) -> None:
    pool = BlockPool(64, PAGE)
    cache = PrefixCache(pool)
    for tokens in written:
        cached(cache, pool, tokens)
    prefixes = {tuple(t[:end]) for t in written for end in range(PAGE, len(t) + 1, PAGE)}
    expected = 0
    while (end := (expected + 1) * PAGE) < len(read) and tuple(read[:end]) in prefixes:
        expected += 1
    assert len(match(cache, read)) == expected


# What the scheduler makes of it.


@pytest.mark.parametrize("length", [1, PAGE, 2 * PAGE, 2 * PAGE + 1])
def test_a_repeated_prompt_reuses_its_pages_and_computes_at_least_one_token(length: int) -> None:
    harness = Harness(page_size=PAGE)
    prompt = list(range(length))
    harness.add(prompt, seed=1)
    harness.drain()
    again = harness.add(prompt, seed=1)
    plan = harness.step()
    expected = (length - 1) // PAGE * PAGE
    assert again.seq.num_cached == expected
    assert (plan.entries[0].start, plan.entries[0].count) == (expected, length - expected)
    assert harness.scheduler.stats.prefix_query_tokens == 2 * length
    assert harness.scheduler.stats.prefix_hit_tokens == expected
    harness.drain()


def test_two_of_the_same_prompt_at_once_compute_it_twice_and_cache_it_once() -> None:
    harness = Harness(page_size=PAGE)
    twins = [harness.add(list(range(8)), seed=1) for _ in range(2)]
    harness.step()
    assert [twin.seq.num_cached for twin in twins] == [0, 0]
    assert not set(twins[0].seq.block_table) & set(twins[1].seq.block_table)
    harness.drain()
    assert harness.scheduler.pool.num_cached == 2


def test_output_tokens_are_reused_by_the_next_turn() -> None:
    harness = Harness(page_size=PAGE)
    first = harness.add(6, max_tokens=7)
    harness.drain()
    # Twelve tokens were computed: the last output token never is.
    turn = harness.add([*first.seq.token_ids, 5, 6, 7])
    harness.step()
    assert turn.seq.num_cached == 12
    harness.drain()


def test_running_sequences_share_the_pages_of_their_prefix() -> None:
    harness = Harness(page_size=PAGE)
    first = harness.add(list(range(10)), max_tokens=8)
    harness.step()
    second = harness.add([*range(8), 50, 51], max_tokens=8)
    harness.step()
    assert second.seq.block_table[:2] == first.seq.block_table[:2]
    assert second.seq.block_table[2] != first.seq.block_table[2]
    assert harness.scheduler.pool.num_held == 4
    harness.drain()


def test_a_sequence_that_must_compute_its_prompt_does_not_read_the_cache() -> None:
    harness = Harness(page_size=PAGE)
    prompt = list(range(9))
    harness.add(prompt, seed=1)
    harness.drain()
    before = harness.scheduler.stats.prefix_query_tokens
    scored = harness.add(prompt, max_tokens=0, reads_prefix_cache=False)
    plan = harness.step()
    assert (scored.seq.num_cached, plan.num_chunk_tokens) == (0, 9)
    assert harness.scheduler.stats.prefix_query_tokens == before


def test_without_prefix_caching_nothing_is_kept() -> None:
    harness = Harness(page_size=PAGE, enable_prefix_caching=False)
    for _ in range(2):
        request = harness.add(list(range(9)), seed=1)
        harness.drain()
        assert request.seq.num_cached == 0
    assert harness.scheduler.pool.num_cached == 0
    assert harness.scheduler.stats.prefix_query_tokens == 0


def test_after_a_reset_old_pages_are_not_found_and_running_sequences_add_none() -> None:
    harness = Harness(page_size=PAGE)
    running = harness.add(list(range(6)), max_tokens=10)
    harness.step()
    harness.change_weights()
    harness.drain()
    assert running.seq.num_output == 10
    assert harness.scheduler.pool.num_cached == 0
    harness.add(list(range(6)), seed=3)
    harness.drain()
    assert harness.scheduler.pool.num_cached > 0


def test_pages_of_an_entry_that_failed_are_not_kept() -> None:
    harness = Harness(page_size=PAGE, token_budget=PAGE, max_prefill_tokens=PAGE)
    broken = harness.add(list(range(12)), breaks_at=5, reads_prefix_cache=False)
    harness.drain()
    assert broken.seq.finish_reason == "error"
    assert harness.scheduler.pool.num_cached == 1
    harness.add(list(range(12)), seed=2)
    harness.drain()

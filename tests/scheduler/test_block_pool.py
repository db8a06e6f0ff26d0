"""Pages: every one is free, held or cached, and no owner is forgotten."""

from __future__ import annotations

import pytest

from scheduler import NULL_PAGE, BlockPool


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (0, 4), (2, 0)])
def test_sizes_that_hold_nothing_are_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        BlockPool(num_pages, page_size)


def test_every_page_but_the_null_page_is_handed_out_once() -> None:
    pool = BlockPool(6, 4)
    assert pool.capacity == 20
    pages = pool.allocate(5)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert NULL_PAGE not in pages
    assert (pool.num_free, pool.num_held) == (0, 5)
    pool.check([pages])


def test_more_than_the_free_pages_is_a_mistake_of_the_scheduler() -> None:
    pool = BlockPool(3, 4)
    with pytest.raises(AssertionError, match="3 pages asked for, 2 are free"):
        pool.allocate(3)


@pytest.mark.parametrize(("num_tokens", "missing"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_table_lacks_the_pages_of_the_tokens_beyond_it(num_tokens: int, missing: int) -> None:
    assert BlockPool(9, 4).num_missing([7], num_tokens) == missing


def test_a_shared_page_is_held_until_its_last_owner_is_gone() -> None:
    pool = BlockPool(4, 4)
    pages = pool.allocate(2)
    pool.share(pages[:1])
    pool.check([pages, pages[:1]])
    pool.release(pages)
    assert (pool.num_held, pool.num_free) == (1, 2)
    pool.check([pages[:1]])
    pool.release(pages[:1])
    assert (pool.num_held, pool.num_free) == (0, 3)
    pool.check([])


def test_a_kept_page_outlives_its_owner_and_can_be_shared_again() -> None:
    pool = BlockPool(4, 4)
    [page] = pool.allocate(1)
    pool.keep(page, b"content")
    assert pool.find(b"content") == page
    pool.release([page])
    assert (pool.num_cached, pool.num_held, pool.num_free) == (1, 0, 3)
    assert pool.find(b"content") == page
    assert pool.num_free_beside([page]) == 2
    pool.share([page])
    assert (pool.num_cached, pool.num_held) == (0, 1)
    assert pool.num_free_beside([page]) == pool.num_free == 2
    pool.check([[page]])


def test_free_pages_go_before_cached_ones() -> None:
    pool = BlockPool(3, 4)
    [kept] = pool.allocate(1)
    pool.keep(kept, b"content")
    pool.release([kept])
    [other] = pool.allocate(1)
    assert other != kept
    assert pool.find(b"content") == kept


def test_the_least_recently_used_page_is_evicted_and_its_key_forgotten() -> None:
    pool = BlockPool(4, 4)
    pages = pool.allocate(3)
    for page, key in zip(pages, [b"a", b"b", b"c"], strict=True):
        pool.keep(page, key)
        pool.release([page])
    pool.share(pages[:1])
    pool.release(pages[:1])  # used again: now the most recent
    assert pool.allocate(1) == pages[1:2]
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [pages[0], None, pages[2]]
    assert pool.allocate(2) == [pages[2], pages[0]]
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [None, None, None]
    pool.check([pages])


def test_of_one_table_the_last_page_is_evicted_first() -> None:
    pool = BlockPool(4, 4)
    table = pool.allocate(3)
    for page, key in zip(table, [b"root", b"middle", b"leaf"], strict=True):
        pool.keep(page, key)
    pool.release(table)
    assert pool.allocate(3) == table[::-1]


def test_of_two_pages_with_the_same_content_the_first_keeps_the_key() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2)
    pool.keep(first, b"content")
    pool.keep(second, b"content")
    pool.release([first, second])
    assert pool.find(b"content") == first
    assert pool.num_cached == 1
    pool.check([])


def test_forgotten_keys_leave_plain_free_pages() -> None:
    pool = BlockPool(4, 4)
    held, cached = pool.allocate(2)
    pool.keep(held, b"held")
    pool.keep(cached, b"cached")
    pool.release([cached])
    pool.forget_keys()
    assert pool.find(b"held") is pool.find(b"cached") is None
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check([[held]])
    pool.release([held])
    assert (pool.num_free, pool.num_cached) == (3, 0)


@pytest.mark.parametrize("wrong", [[], [[1]], [[1, 2], [2]], [[1, 2, 3]], [[1, 2], [NULL_PAGE]]])
def test_check_finds_tables_that_disagree_with_the_reference_counts(wrong: list[list[int]]) -> None:
    pool = BlockPool(5, 4)
    assert pool.allocate(2) == [1, 2]
    pool.check([[1, 2]])
    with pytest.raises(AssertionError):
        pool.check(wrong)

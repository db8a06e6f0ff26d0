"""What a step must not touch: every cell but those of the tokens it computes (B02)."""

from __future__ import annotations

import jax
import numpy as np

from jaxserve.batch import pack_batch
from jaxserve.engine import Engine
from pallas_kernels.tpu_layout import TPULayout
from scheduler import StepPlan
from tests.engine.mini import Mini, greedy


def idle_steps(mini: Mini) -> None:
    """A step of each shape in which every row is padding."""
    for shape in mini.runner.shapes.all():
        layout = mini.runner.spec.batch_layout(shape)
        mini.runner.run(pack_batch(StepPlan((), (), ()), layout), shape)


def snapshot(mini: Mini) -> list[np.ndarray]:
    """Cells and scales of every layer."""
    return [np.array(leaf) for leaf in jax.tree.leaves(mini.runner._cache)]


def live_cells(engine: Engine) -> tuple[list[int], list[int]]:
    """Page and offset of every token computed for a running sequence."""
    page_size = engine.runner.spec.layout.page_size
    pages, offsets = [], []
    for seq in engine.scheduler.running:
        for position in range(seq.num_computed):
            pages.append(seq.block_table[position // page_size])
            offsets.append(position % page_size)
    return pages, offsets


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bit for bit."""
    return np.array_equal(a.view(np.uint8), b.view(np.uint8))


def assert_padding_writes_nothing(
    mini: Mini, asked: list[list[int]], *, max_tokens: int = 24, last_page: bool = False
) -> list[list[int]]:
    """Generate and check the cache around every step; the tokens of every prompt.

    With exactly the pages needed or, with `last_page`, with the cache's last page in use, where
    index -1 would land.
    """
    page_size = mini.runner.spec.layout.page_size
    token_major = isinstance(mini.runner.spec.layout, TPULayout)
    if last_page:
        engine = mini.engine(asynchronous=False)
        engine.scheduler.pool._free.reverse()
    else:
        needed = sum(-(-(len(prompt) + max_tokens - 1) // page_size) for prompt in asked)
        engine = mini.engine(pages=needed + 1, asynchronous=False)
    ids = [engine.submit(prompt, greedy(max_tokens)) for prompt in asked]
    owned: set[int] = set()
    while engine.has_work:
        before = snapshot(mini)
        idle_steps(mini)
        for leaf, now in zip(before, snapshot(mini), strict=True):
            assert same(leaf, now)
        pages, offsets = live_cells(engine)
        owned |= set(pages)
        by_token = (pages, offsets) if token_major else (pages, slice(None), slice(None), offsets)
        engine.step()
        for leaf, now in zip(before, snapshot(mini), strict=True):
            assert same(leaf[by_token], now[by_token])
    engine.check()
    pool = engine.scheduler.pool
    assert owned >= ({pool.num_pages - 1} if last_page else set(range(1, pool.num_pages)))
    assert engine.stats().preemptions == 0
    return [engine.take(request_id).outputs[0].token_ids for request_id in ids]

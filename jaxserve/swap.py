"""The content of preempted sequences' pages in host memory.

Pages travel in groups of one size, so that two executables serve any number of them.  Knows arrays
of pages; which pages and when is the scheduler's business.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jaxserve.config import EngineConfig
from jaxserve.loading.canonical import leaves
from jaxserve.spec import Cache, StepSpec
from pallas_kernels import KVLayout, KVPages
from scheduler import PageCopy

GROUP_BYTES = 8 << 20
"""About as many bytes travel at once: enough for full speed, little to pad."""
MOST_PAGES = 64
"""Pages that travel at once, at most."""

Pages = tuple[KVPages, ...]
"""Some pages of each layer."""


HOST_BYTES_PER_S = {"cpu": 1e10, "gpu": 2e10, "tpu": 1e10}
PREFILL_FLOPS_PER_S = {"cpu": 5e11, "gpu": 1.5e14, "tpu": 1e14}
"""What a step reaches, to the nearest order of magnitude: for a choice, not for a report."""


@dataclass(frozen=True)
class SwapSizes:
    """Sizes of the swap space."""

    num_pages: int
    """Host pages; 0 where nothing is swapped."""
    group: int
    """Pages that travel at once."""


NO_SWAP = SwapSizes(num_pages=0, group=1)


def swap_sizes(config: EngineConfig, spec: StepSpec) -> SwapSizes:
    """Host pages of a configuration.

    Raises:
        ValueError: the space does not hold one page.
    """
    if config.preemption == "recompute":
        return NO_SWAP
    page_bytes = spec.layout.page_bytes * spec.model.num_layers
    num_pages = int(config.swap_space_gib * 2**30) // page_bytes
    if num_pages == 0:
        raise ValueError(
            f"swap_space_gib={config.swap_space_gib} does not hold one page of {page_bytes} "
            f"bytes; give at least {page_bytes / 2**30:.2g}, or preemption='recompute'"
        )
    return SwapSizes(num_pages, max(1, min(GROUP_BYTES // page_bytes, MOST_PAGES)))


def page_cost_tokens(spec: StepSpec, platform: str) -> float:
    """Tokens that are computed in the time in which one page travels to the host and back."""
    page_bytes = spec.layout.page_bytes * spec.model.num_layers
    num_weights = sum(math.prod(leaf.shape) for leaf in leaves(spec.model))
    page_s = 2 * page_bytes / HOST_BYTES_PER_S.get(platform, 1e10)
    token_s = 2 * num_weights / PREFILL_FLOPS_PER_S.get(platform, 1e13)
    return page_s / token_s


def take(layout: KVLayout, cache: Cache, numbers: jax.Array) -> Pages:
    """Pages `numbers`, i32[group], of every layer, as they are stored."""
    return tuple(layout.take_pages(pages, numbers) for pages in cache)


def put(layout: KVLayout, cache: Cache, numbers: jax.Array, content: Pages) -> Cache:
    """The cache with `content` as its pages `numbers`, i32[group]; negative ones are skipped."""
    return tuple(
        layout.put_pages(pages, numbers, new) for pages, new in zip(cache, content, strict=True)
    )


class Group(NamedTuple):
    """Pages that travel together."""

    numbers: npt.NDArray[np.int32]
    """Of the device, i32[group]; -1 where there are fewer."""
    host_pages: tuple[int, ...]


def groups(copy: PageCopy, size: int) -> Iterator[Group]:
    """The pages of a copy, `size` at a time."""
    for first in range(0, len(copy.pages), size):
        numbers = np.full(size, -1, np.int32)
        pages = copy.pages[first : first + size]
        numbers[: len(pages)] = pages
        yield Group(numbers, copy.host_pages[first : first + size])


class _Travelling(NamedTuple):
    content: Pages
    host_pages: tuple[int, ...]
    dispatch: int
    """The step before which it was taken."""


class HostPages:
    """Host memory for pages, and what is on its way there."""

    def __init__(self, num_pages: int, group: Pages) -> None:
        """Reserve memory for `num_pages`; it is taken when it is used.

        Args:
            num_pages: host pages.
            group: abstract pages of a group.
        """
        self._memory = jax.tree.map(lambda x: np.empty((num_pages, *x.shape[1:]), x.dtype), group)
        self._travelling: deque[_Travelling] = deque()

    def receive(self, content: Pages, host_pages: tuple[int, ...], dispatch: int) -> None:
        """Start to fetch pages that were taken before the given step."""
        for leaf in jax.tree.leaves(content):
            leaf.copy_to_host_async()
        self._travelling.append(_Travelling(content, host_pages, dispatch))

    def settle(self, dispatch: int | None = None) -> None:
        """Store what was taken before the given step, which is done, or everything."""
        while self._travelling and (dispatch is None or self._travelling[0].dispatch <= dispatch):
            content, host_pages, _ = self._travelling.popleft()
            pairs = zip(jax.tree.leaves(self._memory), jax.tree.leaves(content), strict=True)
            for memory, new in pairs:
                memory[list(host_pages)] = np.asarray(new)[: len(host_pages)]

    def content(self, host_pages: tuple[int, ...], size: int) -> Any:
        """A copy of some pages, and after them anything up to `size`, to send to the device."""
        self.settle()
        numbers = np.zeros(size, np.intp)
        numbers[: len(host_pages)] = host_pages
        return jax.tree.map(lambda memory: memory[numbers], self._memory)

"""Host memory for the content of pages that a preempted sequence had to give up.

Knows page numbers on either side and who holds them.  The content itself is moved by whoever runs
the plans; that plans reach the device in order makes a page's reuse safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Pages to copy between the device and the host, pair by pair."""

    pages: tuple[int, ...]
    """Of the KV cache."""
    host_pages: tuple[int, ...]
    """Of the swap space."""


class SwapSpace:
    """Hands out host pages (vLLM, SOSP '23, section 4.5)."""

    def __init__(self, num_pages: int) -> None:
        """Start with all of `num_pages` free; 0 is a space that holds nothing.

        Raises:
            ValueError: it is negative.
        """
        if num_pages < 0:
            raise ValueError(f"the swap space has num_pages={num_pages}; it must be at least 0")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Give `count` pages away; at most `num_free`."""
        assert count <= self.num_free, f"{count} host pages asked for, {self.num_free} are free"
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: Sequence[int]) -> None:
        """Take pages back; what they held is of no more use."""
        self._free.extend(reversed(pages))

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Assert that each page is free or held once."""
        pages = [*self._free, *(page for table in held for page in table)]
        assert sorted(pages) == list(range(self.num_pages)), f"host pages {sorted(pages)}"

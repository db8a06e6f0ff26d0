"""How long each part of a start takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds of named phases, in the order of their first occurrence."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        """Seconds of all of them."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        """Such as "weights 0.1 s, executables 1.2 s"."""
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())

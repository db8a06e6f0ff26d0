"""A table of step times from a running engine, for the simulator.

Knows that an engine has a model of its step times which learns, and files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.step_time import Buckets, FittedCost

if TYPE_CHECKING:
    from jaxserve.engine import Engine


def empty_table(engine: Engine) -> FittedCost:
    """A table for the engine's shapes that knows nothing yet."""
    shapes = engine.runner.shapes
    return FittedCost(Buckets(shapes.decode_rows, shapes.chunks))


@contextmanager
def recorded(engine: Engine, table: FittedCost) -> Iterator[FittedCost]:
    """Let a table learn from every dispatch of an engine, instead of the engine's own, if any.

    The time of a dispatch runs from the end of the one before, or from its own start where the
    device had nothing to do, to when the host has its results.  So it has in it whatever keeps the
    device from being fed, and the times of a busy engine add up to its total.
    """
    own = engine.step_cost
    engine.step_cost = table
    try:
        yield table
    finally:
        engine.step_cost = own


def read_table(path: str | Path) -> FittedCost:
    """Read a table of step times.

    Raises:
        ValueError: the file has none.
        OSError: it cannot be read.
    """
    try:
        return FittedCost.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from error


@contextmanager
def written(engine: Engine, path: str | Path) -> Iterator[None]:
    """Record the step times of a block and write what `read_table` reads.

    Raises:
        OSError: the file cannot be written.
    """
    with recorded(engine, empty_table(engine)) as table:
        yield
    Path(path).write_text(json.dumps(table.to_dict()) + "\n", encoding="utf-8")

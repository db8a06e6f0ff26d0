"""Twelve cells of `jaxserve bench kernels --roofline`, those that the targets are about first."""

from __future__ import annotations

import itertools
from typing import Any

from jaxserve.bench.kernels import Roofline
from jaxserve.bench.lengths import MIXES
from jaxserve.bench.roofline import SHAPES, Cell, Heads
from scripts.gpu_stages.context import Context

CELLS = [
    Cell("decode", 32, 2048, "uniform", "bfloat16", 16),
    Cell("decode", 32, 16384, "zipf", "bfloat16", 16),
    Cell("decode", 1, 32768, "uniform", "bfloat16", 16),
    Cell("decode", 32, 2048, "uniform", "int8", 16),
    Cell("prefill", 1, 4096, "uniform", "bfloat16", 16),
    Cell("decode", 32, 16384, "one-long", "bfloat16", 16),
    Cell("decode", 128, 2048, "uniform", "bfloat16", 16),
    Cell("decode", 32, 2048, "uniform", "bfloat16", 64),
    Cell("decode", 32, 2048, "uniform", "fp8", 16),
    Cell("decode", 32, 16384, "zipf", "int8", 16),
    Cell("write", 2048, 1, "uniform", "bfloat16", 16),
    Cell("write", 2048, 1, "uniform", "int8", 16),
]
SMALL = [
    Cell("decode", 4, 64, "zipf", "bfloat16", 16),
    Cell("prefill", 1, 64, "uniform", "int8", 16, chunk=32),
    Cell("write", 32, 1, "uniform", "bfloat16", 16),
]
_FEW = 3
"""Cells for an implementation that is looked at by itself."""
_MARGIN_S = 5.0


def run(context: Context) -> None:
    """Measure the argument's implementations, or a long sweep of all with `--full`."""
    names = context.argument.split(",")
    heads, cells = SHAPES["8b"], CELLS
    if context.small:
        heads, cells = Heads(4, 2, 32), SMALL
    elif context.full:
        cells = CELLS + [cell for cell in _sweep() if cell not in CELLS]
    elif len(names) == 1:
        cells = CELLS[:_FEW]
    # Not much is left of a compilation that is cut off, so the stage ends before that.
    deadline = context.deadline - _MARGIN_S
    sweep = Roofline(heads, cells, names, baselines=len(names) > 1, deadline=deadline)

    def save(report: dict[str, Any]) -> None:
        context.save({**report, "complete": False})

    context.save({**sweep.run(save), "complete": True})


def _sweep() -> list[Cell]:
    axes = itertools.product(
        (1, 8, 32, 128), (512, 2048, 8192, 32768), MIXES, ("bfloat16", "int8"), (16, 64)
    )
    return [Cell("decode", *axis) for axis in axes if axis[0] > 1 or axis[2] == "uniform"]

"""The tuner over the heads of Llama-3-8B; its table is part of the report."""

from __future__ import annotations

import json

from jaxserve.bench.roofline import SHAPES, Heads
from jaxserve.bench.tune import Grid, Tuner
from scripts.gpu_stages.context import Context

_SMALL_GRID = Grid((16, 32), (4,), (2,), (64,), (32,))
_MARGIN_S = 20.0


def run(context: Context) -> None:
    """Decode first; the table is saved as it grows."""
    path = context.scratch / "table.json"
    deadline = context.deadline - _MARGIN_S
    if context.small:
        tuner = Tuner(Heads(4, 2, 32), path, _SMALL_GRID, "xla", 64, 2, deadline)
    else:
        tuner = Tuner(SHAPES["8b"], path, deadline=deadline)
    for op, kv_dtype in (
        ("decode", "bfloat16"),
        ("prefill", "bfloat16"),
        ("decode", "int8"),
        ("decode", "fp8"),
        ("prefill", "int8"),
    ):
        tuner.run((op,), (kv_dtype,), (16,))
        if path.is_file():
            context.save({"table": json.loads(path.read_text(encoding="utf-8")), "complete": False})
        if context.small:
            break
    table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    context.save({"table": table, "complete": True})

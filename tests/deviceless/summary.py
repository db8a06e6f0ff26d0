"""What a compiled program does with the arrays it was given."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from jax.stages import Compiled

KERNELS = {"tpu": "tpu_custom_call", "gpu": "__gpu$xla.gpu.triton"}
"""How a Pallas kernel is called, by platform."""
IN_PLACE = {
    "gpu": {"parameter", "custom-call", "bitcast", "get-tuple-element"},
    "tpu": {"parameter", "scatter", "fusion", "bitcast", "get-tuple-element"},
}
"""Instructions that may have a whole cache as their result: it is their operand, and on a GPU the
kernel that writes, on a TPU a scatter and the fusion around it, changes it where it is."""


def summary(compiled: Compiled, platform: str, cache_shape: tuple[int, ...]) -> dict[str, Any]:
    """Memory, kernel calls, and the instructions not `IN_PLACE` that make a whole cache."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    dimensions = re.escape(",".join(map(str, cache_shape)))
    makers = Counter(re.findall(rf" = \w+\[{dimensions}\]\S* ([\w-]+)\(", text))
    # The result of an asynchronous copy is in a tuple.
    makers.update(re.findall(rf" = \(\w+\[{dimensions}\].* (copy-start|async-start)\(", text))
    assert makers["parameter"], "the cache is not in the program"
    return {
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernel_calls": text.count(f'custom_call_target="{KERNELS[platform]}"'),
        "copies": {op: n for op, n in makers.items() if op not in IN_PLACE[platform]},
    }

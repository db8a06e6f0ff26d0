"""Compiles Mosaic GPU's decode kernels for a chip: `python -m ... CHIP FORM`, for `test_mosaic`."""

from __future__ import annotations

import json
import sys

import jax

from tests.deviceless import gpu
from tests.kernels.mosaic.llama_8b import FORMS


def main(chip: str, form: str) -> None:
    call, target = FORMS[form], gpu.TARGETS[chip]
    arguments = gpu.placed(call.arguments(), gpu.topology(target)[0])
    with gpu.described(target):
        lowered = jax.jit(call).lower(*arguments)
    memory = lowered.compile().memory_analysis()
    cache = call.layout.page_bytes * call.num_pages
    print(json.dumps({"temp_bytes": memory.temp_size_in_bytes, "cache_bytes": cache}))


if __name__ == "__main__":
    main(*sys.argv[1:])

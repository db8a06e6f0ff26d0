"""A golden model on two devices; run in a process of its own, which must be told to have two.

Prints one JSON object: the tokens of every request, the shards' shapes and the compile events.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from jaxserve.sampling_params import SamplingParams
from tests.engine.golden import cases, load

NAME = "llama-gqa"
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.9, top_p=0.9, seed=5, max_tokens=32, ignore_eos=True, presence_penalty=0.5
)


def answers(executables: Path, tensor_parallel_size: int) -> dict[str, Any]:
    """Greedy and sampled tokens of the golden prompts, and where the engine keeps its arrays."""
    llm = load(NAME, executables, tensor_parallel_size=tensor_parallel_size)
    prompts = [case["prompt_ids"] for case in cases(NAME)]
    outputs = llm.generate(prompts * 2, [GREEDY] * len(prompts) + [SAMPLED] * len(prompts))
    llm.engine.check()
    runner = llm.engine.runner
    layer = llm.params["layers"][0]
    arrays = {
        "qkv": layer["attn"]["qkv"],
        "out": layer["attn"]["out"],
        "gate_up": layer["mlp"]["gate_up"],
        "down": layer["mlp"]["down"],
        "embed": llm.params["embed"],
        "cache": runner._cache[0].cells,
    }
    return {
        "devices": jax.device_count(),
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "shapes": {name: list(array.shape) for name, array in arrays.items()},
        "shards": {
            name: [list(shard.data.shape) for shard in array.addressable_shards]
            for name, array in arrays.items()
        },
        "preemptions": llm.engine.stats().preemptions,
        "compilations": llm.engine.stats().compilations_after_ready,
    }


if __name__ == "__main__":
    print(json.dumps(answers(Path(sys.argv[1]), 2)))

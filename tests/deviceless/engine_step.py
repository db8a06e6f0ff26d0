"""Compiles the engine's step for a chip and prints what it does with the memory, as JSON.

    python -m tests.deviceless.engine_step PLATFORM CHIP MODEL ROWS CHUNK DEVICES

Attention is what "auto" chooses for the chip.  Bytes are those of one device.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxserve import sharding
from jaxserve.carry import CarrySizes
from jaxserve.config import EngineConfig
from jaxserve.kv_cache import attention_sizes, choose_attention
from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.models.llama import abstract_model
from jaxserve.shapes import StepShape
from jaxserve.spec import TENSOR_AXIS, StepSpec
from jaxserve.step import build_step
from pallas_kernels import KVPages
from tests.deviceless import gpu, tpu
from tests.deviceless.summary import summary

DTYPE = np.dtype(jnp.bfloat16)
CONFIG = EngineConfig(max_model_len=2048, max_num_seqs=32)
PAGES_PER_DEVICE = 8192
"""On one device a layer's cache of more than 128 MiB, and its share of one is as large on several:
XLA:TPU moves an array that fits a chip's vector memory there and back, and such a copy is not what
is looked for.  What a step needs beside the cache does not grow with it: Llama-3-8B's two layers on
four v5e, 155 MB with 8,192 pages in all, 97 MB with 16,384.
"""


@dataclass(frozen=True)
class Sizes:
    """Of a model; its layers are all alike."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = {
    "smollm2-135m": Sizes(49152, 576, 1536, 30, 9, 3, 64),
    "llama3-8b-2-layers": Sizes(128256, 4096, 14336, 2, 32, 8, 128),
}


def main() -> None:
    platform, chip, model = sys.argv[1:4]
    rows, chunk, num_devices = map(int, sys.argv[4:])
    target: Any = {"gpu": gpu, "tpu": tpu}[platform]
    devices = target.topology(target.TARGETS[chip])[:num_devices]
    mesh = Mesh(np.array(devices), (TENSOR_AXIS,))
    spec = step_spec(MODELS[model], devices[0])
    compiled = compile_step(spec, StepShape(rows, chunk), mesh)
    layer = held(spec, mesh).cells
    layer_bytes = num_bytes(layer)
    print(
        json.dumps(
            summary(compiled, platform, layer.shape)
            | {
                "attention": spec.attention,
                "layers": spec.model.num_layers,
                "layer_bytes": layer_bytes,
                "donated_bytes": layer_bytes * spec.model.num_layers
                + sum(map(num_bytes, spec.sizes.abstract())),
            }
        )
    )


def held(spec: StepSpec, mesh: Mesh) -> KVPages:
    """A layer's pages as one device holds them."""
    whole = spec.layout.abstract(num_pages(mesh))
    placed = sharding.placed(mesh, spec.layout.partition_spec(TENSOR_AXIS))
    return jax.tree.map(
        lambda x, split: jax.ShapeDtypeStruct(split.shard_shape(x.shape), x.dtype), whole, placed
    )


def num_pages(mesh: Mesh) -> int:
    """Of a layer's cache, the null page included."""
    return PAGES_PER_DEVICE * mesh.size + 1


def step_spec(sizes: Sizes, device: Any) -> StepSpec:
    """As the engine's start-up makes it for a device."""
    model = ModelConfig(
        architecture="llama",
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position=8192,
        rms_eps=1e-5,
        rope=RopeConfig(),
        tie_embeddings=sizes.hidden < 4096,
        qkv_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * sizes.layers,
        eos_token_ids=(),
        bos_token_id=None,
    )
    implementation, layout = choose_attention(CONFIG, model, DTYPE, device)
    tuned = attention_sizes(CONFIG, model, implementation, layout, device)
    assert CONFIG.max_model_len is not None
    return StepSpec(
        model=model,
        layout=layout,
        sizes=CarrySizes(
            num_slots=CONFIG.max_num_seqs,
            vocab_size=sizes.vocab,
            pages_per_seq=CONFIG.max_model_len // layout.page_size,
            max_model_len=CONFIG.max_model_len,
        ),
        num_top=CONFIG.max_logprobs,
        decode=tuned.decode,
        prefill=tuned.prefill,
        attention=implementation.name,
    )


def compile_step(spec: StepSpec, shape: StepShape, mesh: Mesh) -> Compiled:
    """As the runner does, from shapes alone."""
    everywhere = sharding.replicated(mesh)
    split = sharding.placed(mesh, spec.layout.partition_spec(TENSOR_AXIS))
    layer = jax.tree.map(on, spec.layout.abstract(num_pages(mesh)), split)
    packed = jax.ShapeDtypeStruct((spec.batch_layout(shape).packed_size,), jnp.int32)
    weights = nnx.to_pure_dict(abstract_model(spec.model, DTYPE)[1])
    step = jax.jit(
        build_step(spec, shape, mesh),
        donate_argnums=(1, 2),
        out_shardings=((split,) * spec.model.num_layers, everywhere, everywhere, everywhere),
    )
    return step.lower(
        jax.tree.map_with_path(
            lambda path, x: on(x, sharding.of_weight(mesh, tuple(key.key for key in path))), weights
        ),
        (layer,) * spec.model.num_layers,
        jax.tree.map(lambda x: on(x, everywhere), spec.sizes.abstract()),
        on(packed, everywhere),
    ).compile()


def on(x: jax.ShapeDtypeStruct, placed: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)


def num_bytes(x: jax.ShapeDtypeStruct) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


if __name__ == "__main__":
    main()

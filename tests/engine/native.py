"""MINI with the CPU kernels: bfloat16 weights packed for an instruction set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve import sharding
from jaxserve.config import EngineConfig
from jaxserve.models.llama import Params
from jaxserve.startup import assemble
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights import CPUPacked, WeightLayout, serve
from tests.engine.mini import CONFIG, OPTIONS, Mini, random_params
from tests.oracle import Oracle

OF_KERNELS: dict[str, Any] = {
    **OPTIONS,
    "dtype": "bfloat16",
    "block_size": 16,
    "masked_steps": "auto",
}


def bfloat16_params() -> Params:
    """MINI's weights, rounded."""
    params = random_params(CONFIG, sharding.make_mesh("cpu", 1))
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def build(
    executables: Path, kernels: str, layout: WeightLayout | None = None, **options: Any
) -> Mini:
    """An engine whose products and attention are the kernels', and its oracle in float64."""
    chosen = {**OF_KERNELS, **options}
    mesh = sharding.make_mesh("cpu", 1)
    params = bfloat16_params()
    layout = layout or CPUPacked(kernels)
    served = jax.tree.map(jnp.asarray, serve(params, layout))
    config = EngineConfig(compilation_cache_dir=str(executables), **chosen)
    tokenizer = Tokenizer.of_bytes()
    engine, _ = assemble(config, CONFIG, served, tokenizer, mesh, weights=layout, kernels=kernels)
    return Mini(CONFIG, engine.runner, Oracle(CONFIG, params), tokenizer, chosen)

"""From a configuration to a ready engine: the choices that depend on platform and model.

Everything that is allocated or compiled is decided here, once, before the first request.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxserve import sharding
from jaxserve.carry import CarrySizes
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.executables import ExecutableStore
from jaxserve.kv_cache import attention_sizes, choose_attention, sized
from jaxserve.loading import (
    ModelSource,
    cache_directory,
    load_config,
    load_params,
    load_tokenizer,
    resolve,
)
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Params
from jaxserve.runner import Runner
from jaxserve.shapes import ShapeSet, shape_set
from jaxserve.spec import StepSpec
from jaxserve.tokenizer import Tokenizer
from scheduler import BlockPool, Scheduler, SchedulerConfig

log = logging.getLogger(__name__)

_DTYPES = {
    "auto": np.dtype(ml_dtypes.bfloat16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


@dataclass(frozen=True)
class Built:
    """A ready engine and what it was built from."""

    engine: Engine
    config: EngineConfig
    """With every `None` that the model or the platform decides filled in."""
    model_config: ModelConfig
    tokenizer: Tokenizer
    source: ModelSource


def build(config: EngineConfig) -> Built:
    """Load the model, size the cache, compile or load every executable.

    Raises:
        ValueError: anything in the configuration that cannot be; one line with the remedy.
    """
    started = time.perf_counter()
    source = resolve(config)
    platform = _platform(config.device)
    mesh = sharding.make_mesh(platform, config.tensor_parallel_size)
    model = load_config(source)
    sharding.check_divisible(model, config.tensor_parallel_size)
    tokenizer = load_tokenizer(source, config.tokenizer, config.chat_template)
    _check_vocabulary(tokenizer, model, source)
    params = _place_params(source, model, _DTYPES[config.dtype], mesh)
    engine, config = assemble(config, model, params, tokenizer, mesh)
    log.info("ready in %.1f s: %s on %s", time.perf_counter() - started, source.name, platform)
    return Built(engine, config, model, tokenizer, source)


def assemble(
    config: EngineConfig, model: ModelConfig, params: Params, tokenizer: Tokenizer, mesh: Mesh
) -> tuple[Engine, EngineConfig]:
    """An engine over weights that are on the device already, and the completed configuration."""
    device = mesh.devices.flat[0]
    dtype = np.dtype(params["embed"].dtype)
    implementation, layout = choose_attention(config, model, dtype, device)
    config = sized(config, model, implementation, layout, params, mesh)
    assert config.max_model_len is not None
    assert config.num_kv_blocks is not None
    assert config.block_size is not None
    shapes = shape_set(config, device.platform)
    tuned = attention_sizes(config, model, implementation, layout, device)
    spec = StepSpec(
        model=model,
        layout=layout,
        sizes=CarrySizes(
            num_slots=config.max_num_seqs,
            vocab_size=model.vocab_size,
            pages_per_seq=-(-config.max_model_len // layout.page_size),
            max_model_len=config.max_model_len,
        ),
        num_top=min(config.max_logprobs, model.vocab_size),
        decode=tuned.decode,
        prefill=tuned.prefill,
        attention=implementation.name,
    )
    directory = Path(
        config.compilation_cache_dir or cache_directory(config.cache_dir) / "executables"
    )
    store = ExecutableStore(directory, repr((spec, shapes)), list(mesh.devices.flat))
    runner = Runner(spec, shapes, mesh, params, config.num_kv_blocks, store)
    if config.warm_up:
        runner.warm_up()
    end_ids = frozenset(model.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
    engine = Engine(
        runner,
        _scheduler(config, shapes),
        tokenizer,
        end_ids=end_ids,
        seed=config.seed,
        asynchronous=config.async_scheduling,
    )
    log.info("shapes: %s", ", ".join(map(str, shapes.all())))
    return engine, config


def _scheduler(config: EngineConfig, shapes: ShapeSet) -> Scheduler:
    assert config.max_model_len is not None
    assert config.num_kv_blocks is not None
    assert config.block_size is not None
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_prefill_tokens=min(shapes.max_chunk, config.max_num_batched_tokens),
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,  # type: ignore[arg-type]  # checked by EngineConfig
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return Scheduler(limits, BlockPool(config.num_kv_blocks, config.block_size))


def _check_vocabulary(tokenizer: Tokenizer, model: ModelConfig, source: ModelSource) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but model {source.name} only "
            f"{model.vocab_size}; give the tokenizer of this model with --tokenizer"
        )


def _platform(device: str) -> str:
    return jax.default_backend() if device == "auto" else device


def _place_params(
    source: ModelSource, model: ModelConfig, dtype: npt.DTypeLike, mesh: Mesh
) -> Params:
    def put(path: tuple[Any, ...], array: npt.NDArray[Any]) -> jax.Array:
        placed: jax.Array = jax.device_put(array, sharding.of_weight(mesh, path))
        return placed

    return load_params(source, model, np.dtype(dtype), put)

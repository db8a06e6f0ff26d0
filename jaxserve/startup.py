"""From a configuration to a ready engine: the choices that depend on platform and model.

Everything that is allocated or compiled is decided here, once, before the first request.
"""

from __future__ import annotations

import dataclasses
import logging
import os
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
from pallas_kernels import KVLayout, choose
from scheduler import BlockPool, Scheduler, SchedulerConfig

log = logging.getLogger(__name__)

_DTYPES = {
    "auto": np.dtype(ml_dtypes.bfloat16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_PAGE_SIZE = {"cpu": 64, "gpu": 16, "tpu": 16}
_CPU_CACHE_BYTES = 1 << 30
"""KV cache of a CPU engine that names no number of pages: enough for tens of chats, and small
beside any laptop's memory."""
_BLOCK_Q = {"cpu": 64}
"""Query tokens per work item of the XLA chunk form: few large ones where launches cost most."""
_BLOCK_KV = 256


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
    platform = mesh.devices.flat[0].platform
    dtype = np.dtype(params["embed"].dtype)
    page_size = config.block_size or _PAGE_SIZE.get(platform, 16)
    layout = KVLayout(dtype, model.num_kv_heads, model.head_dim, page_size, platform)
    config = _sized(config, model, layout, params, mesh)
    assert config.max_model_len is not None
    assert config.num_kv_blocks is not None
    shapes = shape_set(config, platform)
    spec = StepSpec(
        model=model,
        layout=layout,
        sizes=CarrySizes(
            num_slots=config.max_num_seqs,
            vocab_size=model.vocab_size,
            pages_per_seq=-(-config.max_model_len // page_size),
            max_model_len=config.max_model_len,
        ),
        num_top=min(config.max_logprobs, model.vocab_size),
        block_q=_BLOCK_Q.get(platform, 128),
        block_kv=page_size * max(1, _BLOCK_KV // page_size),
        attention=choose(config.attention_backend, platform).name,
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
        _scheduler(config, shapes, page_size),
        tokenizer,
        end_ids=end_ids,
        seed=config.seed,
        asynchronous=config.async_scheduling,
    )
    log.info("attention: %s; shapes: %s", spec.attention, ", ".join(map(str, shapes.all())))
    return engine, config


def _scheduler(config: EngineConfig, shapes: ShapeSet, page_size: int) -> Scheduler:
    assert config.max_model_len is not None
    assert config.num_kv_blocks is not None
    limits = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_prefill_tokens=min(shapes.max_chunk, config.max_num_batched_tokens),
        max_model_len=config.max_model_len,
        policy=config.scheduling_policy,  # type: ignore[arg-type]  # checked by EngineConfig
        enable_chunked_prefill=config.enable_chunked_prefill,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return Scheduler(limits, BlockPool(config.num_kv_blocks, page_size))


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


def _sized(
    config: EngineConfig, model: ModelConfig, layout: KVLayout, params: Params, mesh: Mesh
) -> EngineConfig:
    """Fill in context length and number of pages.

    A context that the cache cannot hold is lowered to what it can, with a warning.
    """
    longest = config.max_model_len or model.max_position
    if config.max_model_len is not None and longest > model.max_position:
        raise ValueError(
            f"max_model_len={longest} is beyond the model's context of {model.max_position} tokens"
        )
    page_bytes = layout.page_bytes * model.num_layers
    pages = config.num_kv_blocks
    if pages is None:
        wanted = config.max_num_seqs * -(-longest // layout.page_size)
        pages = 1 + max(1, min(wanted, _cache_bytes(config, params, mesh) // page_bytes))
    held = (pages - 1) * layout.page_size + 1  # the last token of a sequence needs no cell
    if held < longest:
        log.warning(
            "max_model_len lowered from %d to %d: the KV cache has %d pages of %d tokens; raise "
            "--num-kv-blocks or --memory-utilization for longer sequences",
            longest,
            held,
            pages - 1,
            layout.page_size,
        )
        longest = held
    return dataclasses.replace(
        config, max_model_len=longest, num_kv_blocks=pages, block_size=layout.page_size
    )


def _cache_bytes(config: EngineConfig, params: Params, mesh: Mesh) -> int:
    """Bytes for the KV cache over all devices."""
    devices = list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(_CPU_CACHE_BYTES, memory // 4)
    limit = min((d.memory_stats() or {}).get("bytes_limit", 0) for d in devices)
    share = limit * config.memory_utilization
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / len(devices)
    if share <= weights:
        raise ValueError(
            f"memory_utilization={config.memory_utilization} of {limit} bytes leaves no room for "
            f"a KV cache beside {int(weights)} bytes of weights; raise it or use more devices"
        )
    return int((share - weights) * 0.9) * len(devices)  # a tenth for the steps' own buffers

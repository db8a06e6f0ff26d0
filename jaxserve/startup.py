"""From a configuration to a ready engine: the choices that depend on platform and model.

Everything that is allocated or compiled is decided here, once, before the first request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve import sharding
from jaxserve.carry import CarrySizes
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.executables import ExecutableStore
from jaxserve.host_memory import trim
from jaxserve.kv_cache import attention_sizes, choose_attention, sized
from jaxserve.loading import (
    ModelSource,
    cache_directory,
    load_config,
    load_tokenizer,
    resolve,
    weight_dtype,
)
from jaxserve.masked_steps import SPLIT, WHOLE
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Params
from jaxserve.phases import Phases
from jaxserve.policies import latency_targets, make_scheduler, step_cost
from jaxserve.progress import Progress
from jaxserve.runner import Runner
from jaxserve.served_weights import served_weights
from jaxserve.shapes import ShapeSet, shape_set
from jaxserve.spec import StepSpec
from jaxserve.step import MULTI_STEP
from jaxserve.swap import SwapSizes, page_cost_tokens, swap_sizes
from jaxserve.tokenizer import Tokenizer
from jaxserve.weights import CANONICAL, WeightLayout, load_cpu_kernels, weight_layout
from pallas_kernels import Implementation, KVLayout
from pallas_kernels.tuning import Sizes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A ready engine and what it was built from."""

    engine: Engine
    config: EngineConfig
    """With every `None` that the model or the platform decides filled in."""
    model_config: ModelConfig
    tokenizer: Tokenizer
    source: ModelSource
    seconds: Mapping[str, float]
    """How long each phase of the start took."""


def build(config: EngineConfig) -> Built:
    """Load the model, size the cache, compile or load every executable.

    Raises:
        ValueError: anything in the configuration that cannot be; one line with the remedy.
    """
    phases = Phases()
    with phases("configuration"):
        source = resolve(config)
        platform = _platform(config.device)
        mesh = sharding.make_mesh(platform, config.tensor_parallel_size)
        model = load_config(source)
        sharding.check_divisible(model, config.tensor_parallel_size)
    with phases("tokenizer"):
        tokenizer = load_tokenizer(source, config.tokenizer, config.chat_template)
        _check_vocabulary(tokenizer, model, source)
    with phases("kernels"):
        kernels = cpu_kernels(config, platform)
    with phases("weights"):
        dtype = weight_dtype(config.dtype)
        layout = weight_layout(config, dtype, mesh.devices.flat[0], kernels)
        directory = cache_directory(config.cache_dir) / "weights"
        params = served_weights(source, model, dtype, layout, mesh, directory)
    engine, config = assemble(
        config, model, params, tokenizer, mesh, phases, weights=layout, kernels=kernels
    )
    log.info("ready in %.1f s: %s on %s (%s)", phases.total, source.name, platform, phases)
    return Built(engine, config, model, tokenizer, source, phases.seconds)


def cpu_kernels(config: EngineConfig, platform: str) -> str | None:
    """Instruction set of the CPU kernels, built and loaded now; None where XLA must do."""
    if platform != "cpu":
        return None
    with Progress("building kernels for this CPU"):
        return load_cpu_kernels(config.cpu_kernels, cache_directory(config.cache_dir) / "kernels")


def assemble(
    config: EngineConfig,
    model: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    mesh: Mesh,
    phases: Phases | None = None,
    *,
    weights: WeightLayout = CANONICAL,
    kernels: str | None = None,
) -> tuple[Engine, EngineConfig]:
    """An engine over weights that are on the device already, and the completed configuration.

    Args:
        config: what the user asked for.
        model: the model's configuration.
        params: its weights, laid out as `weights` says.
        tokenizer: for the engine's texts.
        mesh: the devices.
        phases: where the time of each part is recorded.
        weights: the layout of `params`.
        kernels: instruction set of the CPU kernels that are loaded, if any.
    """
    phases = phases or Phases()
    device = mesh.devices.flat[0]
    dtype = np.dtype(params["embed"].dtype)
    implementation, layout = choose_attention(config, model, dtype, device, kernels)
    config = sized(config, model, implementation, layout, params, mesh)
    config = replace(config, multi_step=config.multi_step or MULTI_STEP.get(device.platform, 1))
    shapes = shape_set(config, device.platform, any_rows=not weights.is_canonical)
    tuned = attention_sizes(config, model, implementation, layout, device)
    masked = _masked_steps(config, mesh, kernels)
    asks = kernels if masked == WHOLE else None
    spec = _spec(config, model, implementation, layout, tuned, asks)
    swap = swap_sizes(config, spec)
    with phases("executables"):
        runner = _runner(config, spec, shapes, mesh, params, weights, swap, masked)
    with phases("warm_up"):
        if config.warm_up:
            runner.warm_up()
            trim()
    cost = step_cost(config, shapes)
    scheduler = make_scheduler(
        config,
        shapes,
        clock=time.monotonic,
        cost=cost,
        num_host_pages=swap.num_pages,
        page_cost_tokens=page_cost_tokens(spec, device.platform),
    )
    engine = Engine(
        runner,
        scheduler,
        tokenizer,
        end_ids=frozenset(model.eos_token_ids) | frozenset(tokenizer.eos_token_ids),
        seed=config.seed,
        asynchronous=config.async_scheduling,
        step_cost=cost,
        targets=latency_targets(config),
    )
    log.info("shapes: %s", ", ".join(map(str, shapes.all())))
    return engine, config


def _runner(
    config: EngineConfig,
    spec: StepSpec,
    shapes: ShapeSet,
    mesh: Mesh,
    params: Params,
    weights: WeightLayout,
    swap: SwapSizes,
    masked_steps: str,
) -> Runner:
    """A runner whose executables are loaded, or being compiled."""
    assert config.num_kv_blocks is not None
    directory = config.compilation_cache_dir or cache_directory(config.cache_dir) / "executables"
    made_of = repr((spec, shapes, jax.tree.structure(params)))
    store = ExecutableStore(Path(directory), made_of, list(mesh.devices.flat))
    return Runner(
        spec,
        shapes,
        mesh,
        params,
        config.num_kv_blocks,
        store,
        weights,
        swap,
        masked_steps=masked_steps,
    )


def _masked_steps(config: EngineConfig, mesh: Mesh, kernels: str | None) -> str:
    """How steps that constraints limit are run: a step asks the host through the CPU kernels."""
    can_ask = kernels is not None and mesh.size == 1
    if config.masked_steps == WHOLE and not can_ask:
        raise ValueError(
            "masked_steps='whole' needs one CPU device and the CPU kernels; use 'auto' or 'split'"
        )
    if config.masked_steps != "auto":
        return config.masked_steps
    return WHOLE if can_ask else SPLIT


def _spec(
    config: EngineConfig,
    model: ModelConfig,
    implementation: Implementation,
    layout: KVLayout,
    tuned: Sizes,
    asks: str | None,
) -> StepSpec:
    assert config.max_model_len is not None
    assert config.multi_step is not None
    return StepSpec(
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
        max_steps=config.multi_step,
        asks=asks,
    )


def _check_vocabulary(tokenizer: Tokenizer, model: ModelConfig, source: ModelSource) -> None:
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but model {source.name} only "
            f"{model.vocab_size}; give the tokenizer of this model with --tokenizer"
        )


def _platform(device: str) -> str:
    return jax.default_backend() if device == "auto" else device

"""Choices about the KV cache: its type and layout, who reads it, and how many pages there are.

Made once, at start-up, from the configuration, the model and the device.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Params
from pallas_kernels import (
    Implementation,
    KVLayout,
    Use,
    compute_capability,
    cpu_name,
    implementations,
    select,
)
from pallas_kernels.quantize import CELL_DTYPES
from pallas_kernels.tuned_table import TunedTable
from pallas_kernels.tuning import Sizes, sizes

log = logging.getLogger(__name__)

_PAGE_SIZE = {"cpu": 64, "gpu": 16, "tpu": 16}
_CPU_CACHE_BYTES = 1 << 30
"""KV cache of a CPU engine that names no number of pages: enough for tens of chats, and small
beside any laptop's memory."""


def choose_attention(
    config: EngineConfig,
    model: ModelConfig,
    dtype: np.dtype,
    device: jax.Device,
    cpu_kernels: str | None = None,
) -> tuple[Implementation, KVLayout]:
    """The implementation of attention and the layout of the pages that it reads.

    Args:
        config: names the page size, the type of the pages and the implementation, or leaves them
            to the platform.
        model: its heads.
        dtype: type of the weights, and of the pages unless the configuration says otherwise.
        device: one of the devices that will run it.
        cpu_kernels: instruction set of the CPU kernels that are loaded, if any: on a CPU they are
            taken where they can serve.

    Raises:
        ValueError: the implementation named cannot serve that; says which limit is exceeded.
    """
    platform = device.platform
    plain = KVLayout(
        dtype=np.dtype(ml_dtypes.bfloat16) if config.kv_cache_dtype == "bfloat16" else dtype,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=config.block_size or _PAGE_SIZE.get(platform, 16),
        platform=platform,
        quantized=CELL_DTYPES.get(config.kv_cache_dtype),
    )
    use = Use(
        plain,
        group=model.num_heads // model.num_kv_heads,
        compute_capability=compute_capability(device),
    )
    name = config.attention_backend
    if name == "auto" and platform == "cpu" and cpu_kernels is not None:
        reason = implementations()[cpu_name(cpu_kernels)].refuses(use)
        name = cpu_name(cpu_kernels) if reason is None else name
        if reason is not None:
            log.info("attention stays with XLA: the CPU kernels' %s", reason)
    implementation, layout = select(name, use)
    log.info(
        "attention: %s, %s pages of %d tokens",
        implementation.name,
        layout.cell_dtype,
        layout.page_size,
    )
    return implementation, layout


def attention_sizes(
    config: EngineConfig,
    model: ModelConfig,
    implementation: Implementation,
    layout: KVLayout,
    device: jax.Device,
) -> Sizes:
    """Sizes of both forms of attention, for a configuration whose context length is known.

    Raises:
        ValueError: the table of measured sizes cannot be read; names the file and the value.
    """
    assert config.max_model_len is not None
    return sizes(
        platform="gpu" if implementation.tiled else layout.platform,
        device_kind=device.device_kind,
        head_dim=layout.head_dim,
        group=model.num_heads // model.num_kv_heads,
        page_size=layout.page_size,
        cell_dtype=str(layout.cell_dtype),
        max_len=config.max_model_len,
        table=kernel_table(config.kernel_table, device),
    )


def kernel_table(path: str | None, device: jax.Device) -> TunedTable:
    """Measured kernel sizes: those at `path`, else the shipped ones of the device, if any.

    Raises:
        ValueError: the table cannot be read; names the file and what is wrong.
    """
    if path is not None:
        try:
            return TunedTable.read(path)
        except OSError as error:
            raise ValueError(f"cannot read kernel_table={path!r}: {error}") from None
    package = Path(__file__).parent
    for folder in (package / "configs" / "kernels", package.parent / "configs" / "kernels"):
        if folder.is_dir():
            return TunedTable.of_device(folder, device.device_kind)
    return TunedTable()


def sized(
    config: EngineConfig,
    model: ModelConfig,
    implementation: Implementation,
    layout: KVLayout,
    params: Params,
    mesh: Mesh,
) -> EngineConfig:
    """Fill in page size, context length and number of pages.

    A context that the cache cannot hold is lowered to what it can, with a warning.

    Raises:
        ValueError: the context is beyond the model's, or no memory is left for a cache.
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
        local = dataclasses.replace(layout, num_kv_heads=layout.num_kv_heads // mesh.size)
        pages = implementation.most_pages(local, pages)
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

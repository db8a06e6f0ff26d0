"""What the device is, and its two ceilings: the copy bandwidth and the rate of a large product."""

from __future__ import annotations

from importlib import metadata

import jax

from jaxserve.bench.chained import copy_bandwidth, matmul_rate
from pallas_kernels import implementations
from scripts.gpu_stages.context import Context

_PACKAGES = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy", "torch")


def run(context: Context) -> None:
    """Name the device first, then measure."""
    device = jax.devices()[0]
    result = {
        "platform": device.platform,
        "kind": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "jax": jax.__version__,
        "packages": {name: _version(name) for name in _PACKAGES},
        "implementations": [
            name for name, known in implementations().items() if device.platform in known.platforms
        ],
    }
    context.save(result)
    result["copy_bytes_per_s"] = copy_bandwidth(1 << 24 if context.small else 4 << 30)
    context.save(result)
    result["matmul_flop_per_s"] = matmul_rate(256 if context.small else 8192)
    context.save(result)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""`jaxserve collect-env`: what a bug report needs to know about the machine and the versions."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import msgspec

from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.tables import sections

_PACKAGES = (
    "jaxserve",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "ml-dtypes",
    "tokenizers",
    "transformers",
    "safetensors",
    "gguf",
    "libtpu",
    "jax-cuda13-plugin",
)
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8")
_VARIABLES = ("JAX_", "XLA_", "JAXSERVE_", "CUDA_VISIBLE_DEVICES")


@click.command("collect-env", cls=Verb)
@click.option("--json", is_flag=True, help="One JSON object instead of a table.")
@log_option
def command(json: bool) -> None:
    """Show versions, processor, memory, devices and the environment variables that matter."""
    facts = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "jax": _jax(),
        "environment": _environment(),
    }
    click.echo(msgspec.json.encode(facts) if json else sections(facts))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _environment() -> dict[str, str]:
    """The variables that change what runs; secrets stay out of a report that is made to share."""
    return {
        name: "(set)" if name.endswith(("KEY", "TOKEN", "SECRET")) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES)
    }


def _cpu() -> dict[str, Any]:
    info: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
        info = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    flags = info.get("flags", "").split()
    return {
        "model": info.get("model name", platform.processor()),
        "num_usable": len(os.sched_getaffinity(0)),
        "features": [feature for feature in _CPU_FEATURES if feature in flags],
    }


def _jax() -> dict[str, Any]:
    """The devices; a report must come out even where jax cannot start, so any failure is a fact."""
    try:
        import jax

        devices = jax.devices()
        return {
            "backend": jax.default_backend(),
            "devices": [f"{device.id}: {device.device_kind}" for device in devices],
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}

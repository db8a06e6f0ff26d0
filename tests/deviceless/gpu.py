"""GPUs that are not there: what it takes to compile for one.

XLA compiles for a described chip as it does for a present one: JAX's CUDA plug-in is the compiler,
`ptxas` the assembler, a file in `targets` the chip.  Nothing can run.  Compile in a child process:
the plug-in reads its environment when it is loaded, and may crash.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

ROOT = Path(__file__).parents[2]
PLUGIN = "jax_cuda13_plugin"
WITHOUT_DRIVER = {
    # JAX's own switch: no check of the CUDA libraries, which would ask the driver.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    # The plug-in compiles; it is not to look for devices.
    "JAX_PLATFORMS": "cpu",
}


@dataclass(frozen=True)
class Target:
    """A chip to compile for."""

    name: str
    kind: str
    """What JAX calls the device."""
    capability: tuple[int, int]

    def __str__(self) -> str:
        return self.name

    @property
    def description(self) -> str:
        """XLA's target configuration."""
        return (Path(__file__).parent / "targets" / f"{self.name}.txtpb").read_text()


A100 = Target("a100", "NVIDIA A100-SXM4-80GB", (8, 0))
H100 = Target("h100", "NVIDIA H100 80GB HBM3", (9, 0))
H200 = Target("h200", "NVIDIA H200", (9, 0))
B200 = Target("b200", "NVIDIA B200", (10, 0))
TARGETS = {target.name: target for target in (A100, H100, H200, B200)}


def missing() -> str | None:
    """What a compile needs and this environment lacks, or None."""
    if importlib.util.find_spec(PLUGIN) is None:
        return "needs the package jax-cuda13-plugin"
    if not _has_ptxas():
        return "needs ptxas: the package nvidia-cuda-nvcc or a CUDA toolkit"
    return None


def _has_ptxas() -> bool:
    wheels = importlib.util.find_spec("nvidia")
    places = [] if wheels is None else list(wheels.submodule_search_locations or ())
    found = any((Path(place) / "cu13" / "bin" / "ptxas").exists() for place in places)
    return found or shutil.which("ptxas") is not None or Path("/usr/local/cuda/bin/ptxas").exists()


def topology(target: Target, num_devices: int = 1) -> list[Any]:
    """Devices of the described chip, for the shardings of abstract arguments."""
    described = topologies.get_topology_desc(
        "", platform="cuda", target_config=target.description, topology=f"1x1x{num_devices}"
    )
    return list(described.devices)


def placed(tree: Any, device: Any) -> Any:
    """The shapes and types of `tree` as arguments on a device of `topology`."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


@dataclass(frozen=True)
class _Device(AbstractDevice):
    """An abstract device that knows what Mosaic GPU asks a present one."""

    compute_capability: str


def described(target: Target) -> AbstractContextManager[Any]:
    """Context in which Pallas lowers for the chip.  Needs no plug-in."""
    capability = ".".join(map(str, target.capability))
    device = _Device(target.kind, None, "gpu", capability)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def in_child(module: str, *arguments: str, timeout_s: float, **environment: str) -> Any:
    """What `python -m module arguments` prints last, as JSON.

    Raises:
        AssertionError: it failed; the message has its errors.
        subprocess.TimeoutExpired: it did not end.
    """
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | WITHOUT_DRIVER | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert run.returncode == 0, f"{run.args} failed:\n{run.stderr}"
    return json.loads(run.stdout.splitlines()[-1])

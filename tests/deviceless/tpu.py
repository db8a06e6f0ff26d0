"""TPUs that are not there: what it takes to compile for one.

libtpu is the compiler, and knows every chip by name.  Nothing can run.  Compile in a child process:
libtpu reads its environment when it is loaded.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    # The compiler is not to ask the cloud which machine this is.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


@dataclass(frozen=True)
class Target:
    """A chip to compile for."""

    name: str
    kind: str
    """What JAX calls the device."""
    topology: str
    """The smallest arrangement of such chips that every libtpu knows."""

    def __str__(self) -> str:
        return self.name


V5E = Target("v5e", "TPU v5 lite", "v5e:2x2")
V6E = Target("v6e", "TPU v6 lite", "v6e:2x2")
V7X = Target("tpu7x", "TPU7x", "tpu7x:2x2x1")
TARGETS = {target.name: target for target in (V5E, V6E, V7X)}


def missing() -> str | None:
    """What a compile needs and this environment lacks, or None."""
    return None if importlib.util.find_spec("libtpu") else "needs the package libtpu"


def topology(target: Target) -> list[Any]:
    """Devices of the described chips, for the shardings of abstract arguments."""
    return list(topologies.get_topology_desc(target.topology, platform="tpu").devices)


def described(target: Target) -> AbstractContextManager[Any]:
    """Context in which Pallas lowers for the chip."""
    device = AbstractDevice(device_kind=target.kind, num_cores=1, platform="tpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))

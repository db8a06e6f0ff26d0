from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.files import cache_directory
from jaxserve.weights import load_cpu_kernels
from tests.engine.mini import Mini


@pytest.fixture(scope="session")
def executables(request: pytest.FixtureRequest) -> Path:
    """Compiled executables, shared by the tests of a run and found again by the next run."""
    cache = request.config.cache
    assert cache is not None
    return Path(cache.mkdir("executables"))


@pytest.fixture(scope="session")
def mini(executables: Path) -> Mini:
    """Its steps ask the host for masks, where a compiler for the CPU kernels is there."""
    kernels = load_cpu_kernels("auto", cache_directory(None) / "kernels")
    return Mini.build(executables, kernels=kernels, masked_steps="auto")


@pytest.fixture(scope="session")
def split_mini(executables: Path) -> Mini:
    """The same, with steps that constraints limit in two halves, as where the host is apart."""
    return Mini.build(executables, masked_steps="split")

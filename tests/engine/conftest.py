from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.mini import Mini


@pytest.fixture(scope="session")
def executables(request: pytest.FixtureRequest) -> Path:
    """Compiled executables, shared by the tests of a run and found again by the next run."""
    cache = request.config.cache
    assert cache is not None
    return Path(cache.mkdir("executables"))


@pytest.fixture(scope="session")
def mini(executables: Path) -> Mini:
    return Mini.build(executables, grammars=True)

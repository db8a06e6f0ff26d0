"""One server process for all tests that do not need one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.model import make_model
from tests.server.process import ServerProcess


@pytest.fixture(scope="session")
def server_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled executables, shared by every server of the session."""
    return tmp_path_factory.mktemp("server-cache")


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(model_directory: Path, server_cache: Path) -> Iterator[ServerProcess]:
    """A server of the tiny model, under the name "tiny"."""
    with ServerProcess(model_directory, cache=server_cache) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """A client of that server."""
    with server.client() as client:
        yield client

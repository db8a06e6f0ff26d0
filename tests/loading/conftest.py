from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.loading import ModelSource
from tests.demo import demo_source as find_demo


@pytest.fixture(scope="session")
def demo_source() -> ModelSource:
    return find_demo()


@pytest.fixture(scope="session")
def demo_gguf(demo_source: ModelSource) -> Path:
    return demo_source.path


@pytest.fixture(scope="session")
def golden() -> Path:
    """Directory of the committed tiny models."""
    return Path(__file__).parent.parent / "golden"

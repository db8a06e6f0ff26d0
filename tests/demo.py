"""The demo model for tests: found in, or fetched into, the user's cache."""

from __future__ import annotations

import pytest

from jaxserve.config import EngineConfig
from jaxserve.loading import ModelSource, cache_directory, resolve
from jaxserve.loading.demo import fetch_demo_model


def demo_source() -> ModelSource:
    """The demo model, converted to bfloat16; skips the test where it cannot be had."""
    try:
        fetch_demo_model(cache_directory(None))
    except ValueError as error:
        pytest.skip(f"no demo model: {error}")
    return resolve(EngineConfig(dtype="bfloat16"))

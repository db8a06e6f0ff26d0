"""jaxserve: continuous-batching LLM inference on JAX.

`from jaxserve import LLM, SamplingParams` is all a script needs.  Names load on first use, so
that importing the package (and `jaxserve --help`) does not import JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.async_llm import AsyncLLM as AsyncLLM
    from jaxserve.config import EngineConfig as EngineConfig
    from jaxserve.engine import Engine as Engine
    from jaxserve.llm import LLM as LLM
    from jaxserve.outputs import CompletionOutput as CompletionOutput
    from jaxserve.outputs import RequestOutput as RequestOutput
    from jaxserve.outputs import ScoreOutput as ScoreOutput
    from jaxserve.sampling_params import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxserve.llm",
    "AsyncLLM": "jaxserve.async_llm",
    "Engine": "jaxserve.engine",
    "EngineConfig": "jaxserve.config",
    "SamplingParams": "jaxserve.sampling_params",
    "CompletionOutput": "jaxserve.outputs",
    "RequestOutput": "jaxserve.outputs",
    "ScoreOutput": "jaxserve.outputs",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name from where it is defined."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

"""The OpenAI-compatible HTTP server: starlette in front of `AsyncLLM`.

Knows HTTP, admission and the shutdown.  What bodies mean is `jaxserve.protocol`'s; how answers are
made is the engine's.  Nothing outside this package and the command line imports it.
"""

from __future__ import annotations

from jaxserve.server.config import ServerConfig

__all__ = ["ServerConfig"]

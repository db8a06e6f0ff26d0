"""Counts compile events of the whole process: the proof that nothing recompiles.

JAX reports every trace and every backend compilation to `jax.monitoring`, those of eager
operations included; there is no way to compile behind this counter's back.
"""

from __future__ import annotations

import functools

import jax

EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileCounter:
    """Compile events since it was created or last reset."""

    def __init__(self) -> None:
        """Start counting."""
        self._log = _event_log()
        self._start = 0
        self.reset()

    def reset(self) -> None:
        """Count from here."""
        self._start = len(self._log)

    @property
    def count(self) -> int:
        """Events since then: traces and compilations."""
        return len(self._log) - self._start


@functools.cache
def _event_log() -> list[str]:
    """The process's compile events; JAX keeps listeners forever, so there is one."""
    log: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event in EVENTS:
            log.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return log

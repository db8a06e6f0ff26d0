"""Put words into the model's mouth: the engine's text path, with tokens that a test chooses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.engine import Engine
from jaxserve.outputs import Delta, RequestOutput
from jaxserve.report import StepOutput
from jaxserve.runner import Runner, Ticket
from jaxserve.sampling_params import SamplingParams
from tests.engine.mini import drain


class Teacher:
    """A runner whose reports name the tokens of a script, whatever the model has sampled."""

    def __init__(self, runner: Runner, script: Iterable[int]) -> None:
        self._runner = runner
        self._script = iter(script)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def read(self, ticket: Ticket) -> StepOutput:
        report = self._runner.read(ticket)
        token = next(self._script, None)
        return report if token is None else replace(report, token=np.full_like(report.token, token))


def recite(
    engine: Engine, script: Iterable[int], params: SamplingParams, prompt: tuple[int, ...] = (72,)
) -> tuple[RequestOutput, list[Delta]]:
    """Run one request on a fresh engine that samples `script`; its result and its deltas."""
    engine._dispatcher._runner = Teacher(engine.runner, script)  # type: ignore[assignment]
    request_id = engine.submit(prompt, params)
    deltas = drain(engine)
    return engine.take(request_id), deltas

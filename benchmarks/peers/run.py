"""One run from environments to results: make what is missing, then take turns.

What cannot be made, or fails, takes its engine out; the run goes on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.peers.document import document
from benchmarks.peers.engines import MAX_MODEL_LEN, Engine
from benchmarks.peers.environments import NotInstalled, given_environment, make_environment
from benchmarks.peers.machine import machine
from benchmarks.peers.measure import QUIET, Group, Results, Tokens
from benchmarks.peers.models import NotPrepared, prepare
from benchmarks.peers.process import Worker
from benchmarks.peers.work import Item

ROOT = Path(__file__).parents[2]
"""Of the checkout: what workers import."""


@dataclass
class Run:
    """A run, and what it has found."""

    pythons: Mapping[str, str]
    """Label -> interpreter that runs this project."""
    environments: Mapping[str, str]
    """Peer -> directory of an environment that is there already."""
    directory: Path
    """Where environments, models and logs are kept."""
    base_python: str
    """Makes environments."""
    gguf: Path
    """The demo model."""
    say: Callable[[str], None]
    """Tells the user."""
    results: Results = field(default_factory=Results)
    _machine: dict[str, Any] = field(default_factory=machine)
    _start: float = field(default_factory=time.monotonic)
    _python: dict[str, Path] = field(default_factory=dict)
    """Peer -> interpreter of its environment."""
    _model: dict[str, Path] = field(default_factory=dict)

    def prepare(self, engines: Sequence[Engine]) -> None:
        """Make the environments and models that the engines need."""
        broken: dict[str, str] = {}
        for engine in engines:
            try:
                if engine.family in broken:
                    raise NotInstalled(broken[engine.family])
                self._prepare(engine)
            except NotInstalled as error:
                broken[engine.family] = str(error)
                self._out(engine, f"not installed: {error}")
            except NotPrepared as error:
                self._out(engine, f"its model could not be made: {error}")

    def reference(self, engine: Engine, items: Sequence[Item]) -> dict[str, Tokens]:
        """Kind of item -> the tokens to compare with, from the largest item of that kind."""
        largest = {item.kind: item for item in sorted(items, key=lambda item: item.slots)}
        slots = max(item.engine_slots for item in items)
        with Group([engine], self._start_worker(slots), self.results, self.say) as group:
            return {kind: group.tokens(item.requests) for kind, item in largest.items()}

    def measure(
        self,
        engines: Sequence[Engine],
        items: Sequence[Item],
        *,
        repeats: int,
        few: int,
        reference: Mapping[str, Tokens],
    ) -> None:
        """Take turns.  Engines are loaded once for each number of slots that they must have."""
        for slots, group_items in groupby(items, key=lambda item: item.engine_slots):
            with Group(engines, self._start_worker(slots), self.results, self.say) as group:
                for item in group_items:
                    group.measure(item, repeats, few, reference.get(item.kind, []))
                group.finish()

    def document(
        self, engines: Sequence[Engine], items: Sequence[Item], repeats: int
    ) -> dict[str, Any]:
        """Everything, as plain data."""
        settings = {
            "repeats": repeats,
            "quiet_share": QUIET,
            "max_model_len": MAX_MODEL_LEN,
            "took_s": time.monotonic() - self._start,
        }
        return document(self._machine, settings, engines, items, self.results)

    def _prepare(self, engine: Engine) -> None:
        if not engine.ours and engine.family not in self._python:
            self.say(f"environment of {engine.family}")
            given = self.environments.get(engine.family)
            self._python[engine.family] = (
                make_environment(engine.family, self.directory / "environments", self.base_python)
                if given is None
                else given_environment(Path(given))
            )
        if engine.model not in self._model:
            self._model[engine.model] = prepare(
                engine.model, self.gguf, self.directory / "models", self._python.get("openvino")
            )

    def _start_worker(self, slots: int) -> Callable[[Engine], Worker]:
        def start(engine: Engine) -> Worker:
            python = (
                self.pythons[engine.interpreter or ""]
                if engine.ours
                else self._python[engine.family]
            )
            options = {
                "model": str(self._model[engine.model]),
                "slots": slots,
                "max_model_len": MAX_MODEL_LEN,
                "fields": dict(engine.fields),
            }
            command = [str(python), "-m", engine.module, json.dumps(options)]
            log = self.directory / "logs" / f"{engine.name}-{slots}.log"
            return Worker(command, ROOT, log, self._environment(engine))

        return start

    def _environment(self, engine: Engine) -> dict[str, str]:
        """Ours as it is; a peer must not see packages that are not its own."""
        kept = dict(os.environ)
        if not engine.ours:
            kept.pop("PYTHONPATH", None)
        return kept

    def _out(self, engine: Engine, reason: str) -> None:
        self.say(f"{engine.name} is out: {reason}")
        self.results.failed[engine.name] = reason

"""The engines of a run: which worker, in which environment, on which weights.

Does not know how an environment or a model is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import EngineConfig

MAX_MODEL_LEN = 1024
"""Longest sequence, for the engines that want to know."""
WEIGHTS = ("bf16", "int8")
PEERS = ("openvino", "vllm", "transformers")
FEW_REPEATS = frozenset({"transformers"})
"""Engines so slow that a few repeats must do."""
OURS = "jaxserve"


@dataclass(frozen=True)
class Engine:
    """One row of the results."""

    name: str
    """Unique, such as "openvino-int8"."""
    family: str
    """"jaxserve" or one of PEERS: the worker and the environment."""
    weights: str
    """"bf16", "int8" or, for the reference, "f32"."""
    model: str
    """Which of the prepared models it reads."""
    interpreter: str | None = None
    """Label of the interpreter, for ours."""
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Of `EngineConfig`, for ours."""

    @property
    def ours(self) -> bool:
        """Whether it is this project's."""
        return self.family == OURS

    @property
    def module(self) -> str:
        """Of its worker."""
        return f"benchmarks.peers.workers.{'ours' if self.ours else self.family}"


def ours(label: str, weights: str) -> Engine:
    """This project's engine on one interpreter."""
    fields = {
        "f32": {"dtype": "float32"},
        "bf16": {"dtype": "bfloat16"},
        "int8": {"dtype": "bfloat16", "quantization": "int8"},
    }
    name = f"{OURS}-{label}-{weights}"
    return Engine(name, OURS, weights, "gguf", label, fields[weights])


def peer(family: str, weights: str) -> Engine | None:
    """Another engine, or None if it has no such weights here."""
    if family == "openvino":
        return Engine(f"openvino-{weights}", family, weights, f"openvino-{weights}")
    return Engine(f"{family}-bf16", family, weights, "hf-bf16") if weights == "bf16" else None


def int8_is_known() -> bool:
    """Whether this checkout serves int8 weights."""
    for option in dataclasses.fields(EngineConfig):
        if option.name == "quantization":
            return "int8" in (option.metadata["choices"] or ())
    return False


def line_up(labels: Sequence[str], families: Sequence[str], weights: Sequence[str]) -> list[Engine]:
    """The engines in the order of their turns, those to compare next to each other.

    Without int8 weights of our own, a peer's are run all the same.
    """
    found = []
    for kind in weights:
        mine = [ours(label, kind) for label in labels if kind != "int8" or int8_is_known()]
        others = [engine for family in families if (engine := peer(family, kind)) is not None]
        found += [*mine[:1], *others[:1], *mine[1:], *others[1:]]
    return found

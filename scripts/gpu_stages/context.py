"""What a stage is told, and where it leaves its results."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Context:
    """One stage's run."""

    result: Path
    """Its JSON file."""
    scratch: Path
    """Directory for files that nobody needs afterwards."""
    argument: str
    """What the stage is about, such as the name of an implementation."""
    small: bool
    """Tiny sizes, to try everything on a CPU."""
    full: bool
    """Long sweeps."""
    deadline: float
    """`time.monotonic` when the stage is ended from outside."""

    def save(self, result: dict[str, Any]) -> None:
        """Leave what is known so far, in one piece: what comes later may hang."""
        partial = self.result.with_suffix(".partial")
        partial.write_text(json.dumps(result), encoding="utf-8")
        os.replace(partial, self.result)

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


def short(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]

"""Run one stage in this process: the parent watches its time."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from scripts.gpu_stages.context import Context


def main() -> None:
    """Arguments: module, argument, result file, scratch directory, seconds, small, full."""
    module, argument, result, scratch, seconds, small, full = sys.argv[1:]
    context = Context(
        result=Path(result),
        scratch=Path(scratch),
        argument=argument,
        small=small == "1",
        full=full == "1",
        deadline=time.monotonic() + float(seconds),
    )
    importlib.import_module(f"scripts.gpu_stages.{module}").run(context)


if __name__ == "__main__":
    main()

"""Check and measure jaxserve on one GPU, in at most six minutes.

    python scripts/gpu_check.py --out DIRECTORY             # report.json and report.md there
    python scripts/gpu_check.py --out DIRECTORY --small     # the same on a CPU, tiny, to try it
    python scripts/gpu_check.py --out DIRECTORY --full      # longer sweeps and the tuner, an hour

Needs JAX and what the engine's core imports, no network and no model: weights are random.
Kernels are compared with their oracle in poisoned pages, the engine's tokens with the CPU's and
with transformers'; then come the roofline, decode steps of models of real size and the batching
modes.  Each stage is a process with a deadline, and its results are in the report at once.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run from anywhere: the checkout is what is checked."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from scripts.gpu_stages.parent import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())

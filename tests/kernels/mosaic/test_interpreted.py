"""Runs `interpreted` in a process of its own, with a deadline: a wrong barrier hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[3]
DEADLINE_S = 300
"""Several times what it takes on a loaded machine."""


@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason=f"Mosaic GPU needs JAX 0.11, not {jax.__version__}"
)
def test_the_kernels_keep_the_rules_in_the_interpreter() -> None:
    rules = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(rules)]
    try:
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"hung after {DEADLINE_S} s:\n{(late.stdout or b'').decode()}")
    assert run.returncode == 0, run.stdout.decode()

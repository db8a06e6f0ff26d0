"""Two devices that share the KV heads say what one says: the sharding seam is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.golden import cases, load
from tests.engine.two_devices import NAME, answers
from tests.oracle import assert_same_greedy

ROOT = Path(__file__).parents[2]


def test_two_devices_equal_one(executables: Path) -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.two_devices", str(executables)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    two = json.loads(done.stdout)
    one = answers(executables, 1)

    assert two["devices"] == 2
    assert two["compilations"] == one["compilations"] == 0
    assert two["preemptions"] > 0
    shapes, shards = two["shapes"], two["shards"]
    for name, axis in {"qkv": 0, "out": 1, "gate_up": 0, "down": 1, "cache": 2}.items():
        half = list(shapes[name])
        half[axis] //= 2
        assert shards[name] == [half, half], name
    assert shards["embed"] == [shapes["embed"]] * 2
    assert all(len(kept) == 1 for kept in one["shards"].values())

    wanted = cases(NAME)
    for case, first, second in zip(wanted, one["tokens"], two["tokens"], strict=False):
        assert_same_greedy(first, case["output_ids"], case["top2_gaps"])
        assert_same_greedy(second, case["output_ids"], case["top2_gaps"])
    assert two["tokens"][len(wanted) :] == one["tokens"][len(wanted) :]


@pytest.mark.parametrize(("size", "message"), [(2, "2, but there are 1 cpu devices"), (3, "3")])
def test_devices_that_are_not_there(executables: Path, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel_size={message}"):
        load(NAME, executables, tensor_parallel_size=size)

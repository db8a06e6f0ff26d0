"""Compiled executables on disk: found again, checked, and rebuilt when they cannot be used."""

from __future__ import annotations

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.executables import ExecutableStore, Program

DEVICES = jax.devices()[:1]
SHAPE = jax.ShapeDtypeStruct(
    (64, 64), np.float32, sharding=jax.sharding.SingleDeviceSharding(DEVICES[0])
)


class Lowered:
    """Programs that count how often they are lowered."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def program(self, name: str, add: float = 1.0) -> Program:
        def compute(x: jax.Array) -> jax.Array:
            return jnp.where(x > 2, x * 2 + add, jnp.cumsum(x, 0)).sum(1)

        def lower() -> jax.stages.Lowered:
            self.names.append(name)
            return jax.jit(compute).lower(SHAPE)

        return Program(name=name, lower=lower, arguments=(SHAPE,), results=SHAPE)


def run(directory: Path, programs: list[Program], context: str = "test") -> list[float]:
    """Start the programs in a new store, call each, and return the first of its results."""
    store = ExecutableStore(directory, context, DEVICES)
    made = store.start(programs)
    results = [made[p.name].result()(jnp.ones((64, 64))) for p in programs]
    store.close()
    return [float(result[0]) for result in results]


def test_lowered_once_per_context(tmp_path):
    lowered = Lowered()
    programs = [lowered.program("a"), lowered.program("b")]
    for _ in range(2):
        assert run(tmp_path, programs) == [64, 64]
        assert sorted(lowered.names) == ["a", "b"]
    run(tmp_path, programs[:1], context="another")
    assert lowered.names.count("a") == 2
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["a", "a", "b"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "not an executable"])
def test_what_cannot_be_used_is_rebuilt(tmp_path, caplog, damage):
    lowered = Lowered()
    programs = [lowered.program("a")]
    run(tmp_path, programs)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    if damage == "not an executable":
        import hashlib

        content = hashlib.sha256(b"nonsense").digest() + b"nonsense"
    elif damage == "flipped":
        content = content[:50] + bytes([content[50] ^ 1]) + content[51:]
    path.write_bytes({"truncated": content[:-1], "empty": b""}.get(damage, content))
    with caplog.at_level(logging.WARNING):
        assert run(tmp_path, programs) == [64]
    assert [record.message.split(":")[0].split(",")[0] for record in caplog.records] == [
        "rebuilding a"
    ]
    caplog.clear()
    run(tmp_path, programs)
    run(tmp_path, programs)
    assert caplog.records == []
    assert lowered.names.count("a") <= 3


def test_a_directory_that_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert run(tmp_path / "file", [Lowered().program("a")]) == [64]
    assert "not keeping executable a-" in caplog.text


def test_the_cache_of_jax_does_not_spoil_ours(tmp_path):
    """Executables from JAX's own cache serialise into something that fails when it is called."""
    before = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    try:
        Lowered().program("a", add=3.0).lower().compile()
        assert list((tmp_path / "jax").iterdir())
        for _ in range(2):
            assert run(tmp_path / "ours", [Lowered().program("a", add=3.0)]) == [64]
        assert jax.config.jax_enable_compilation_cache
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

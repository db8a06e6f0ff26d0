"""From a model's files to what is served: the same on the first start and on the second."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve import served_weights as module
from jaxserve import sharding
from jaxserve.config import EngineConfig
from jaxserve.host_memory import Arena
from jaxserve.loading import load_config, load_params, resolve
from jaxserve.loading.convert import convert
from jaxserve.models.packed import PackedWeight
from jaxserve.served_weights import served_weights
from jaxserve.weights import CPUPacked, WeightLayout, canonical
from tests.loading.gguf_files import write_gguf
from tests.loading.tiny import assert_same_tree, flat, keep, tiny_config, tiny_tensors, write_model

BF16 = np.dtype(ml_dtypes.bfloat16)
MESH = sharding.make_mesh("cpu", 1)
LAYOUTS = [WeightLayout(), CPUPacked("avx512")]


@pytest.fixture
def gguf(tmp_path: Path, golden: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", golden / "llama-gqa")


def found(path: Path, tmp_path: Path, **options: Any):
    return resolve(EngineConfig(model=str(path), cache_dir=str(tmp_path / "cache"), **options))


def serve(source, tmp_path: Path, layout: WeightLayout, dtype=BF16):
    return served_weights(source, load_config(source), dtype, layout, MESH, tmp_path / "weights")


def files(tmp_path: Path) -> list[Path]:
    directory = tmp_path / "weights"
    return sorted(directory.iterdir()) if directory.is_dir() else []


def no_loading(*_: Any) -> None:
    raise AssertionError("the weights were loaded again")


def assert_same_served(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_second_start_serves_the_same_without_loading(tmp_path, gguf, monkeypatch, layout):
    source = found(gguf, tmp_path)
    plain = load_params(source, load_config(source), BF16, keep)
    first = serve(source, tmp_path, layout)
    assert_same_tree(canonical(first, layout), plain)
    assert [path.suffix for path in files(tmp_path)] == [".weights"]
    monkeypatch.setattr(module, "load_params", no_loading)
    second = serve(source, tmp_path, layout)
    assert_same_served(second, first)
    assert_same_tree(canonical(second, layout), plain)
    packs = any(isinstance(leaf, PackedWeight) for leaf in flat(second).values())
    assert packs is not layout.is_canonical


def test_the_arrays_are_the_memory_that_was_read_into(tmp_path, gguf, monkeypatch):
    source = found(gguf, tmp_path)
    serve(source, tmp_path, LAYOUTS[1])
    pieces = set()
    allocate = Arena.allocate

    def recorded(arena, size):
        piece = allocate(arena, size)
        pieces.add(piece.ctypes.data)
        return piece

    monkeypatch.setattr(Arena, "allocate", recorded)
    monkeypatch.setattr(module, "load_params", no_loading)
    tree = serve(source, tmp_path, LAYOUTS[1])
    leaves = jax.tree.leaves(tree)
    assert {leaf.unsafe_buffer_pointer() for leaf in leaves} == pieces
    assert all(leaf.sharding.is_fully_replicated for leaf in leaves)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.9, 1.0])
def test_a_damaged_file_costs_a_line(tmp_path, gguf, caplog, place):
    source = found(gguf, tmp_path)
    first = serve(source, tmp_path, LAYOUTS[1])
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[min(int(len(content) * place), len(content) - 1)] ^= 0xFF
    file.write_bytes(content[:-1] if place == 0.0 else content)
    with caplog.at_level(logging.WARNING):
        assert_same_served(serve(source, tmp_path, LAYOUTS[1]), first)
        assert_same_served(serve(source, tmp_path, LAYOUTS[1]), first)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "making the weights anew"
    ]


def test_one_file_per_dtype_and_layout(tmp_path, gguf):
    source = found(gguf, tmp_path)
    for layout, dtype in [(LAYOUTS[0], BF16), (LAYOUTS[1], BF16), (LAYOUTS[0], np.dtype("f4"))]:
        serve(source, tmp_path, layout, dtype)
    names = [path.name.rsplit("-", 2)[0] for path in files(tmp_path)]
    assert names == ["m-bfloat16-canonical", f"m-bfloat16-{LAYOUTS[1].name}", "m-float32-canonical"]


def test_a_changed_model_is_loaded_again(tmp_path, gguf, golden):
    serve(found(gguf, tmp_path), tmp_path, LAYOUTS[1])
    write_gguf(gguf, golden / "llama-gqa", metadata={"general.name": "another"})
    source = found(gguf, tmp_path)
    serve(source, tmp_path, LAYOUTS[1])
    assert len(files(tmp_path)) == 1


def test_only_what_was_converted_or_packed_is_kept(tmp_path, golden):
    hf = golden / "llama-gqa"
    convert(str(hf), str(tmp_path / "orbax"), "orbax")
    (tmp_path / "mini.json").write_text((hf / "config.json").read_text())
    dummy = found(tmp_path / "mini.json", tmp_path, load_format="dummy")
    for source in (found(hf, tmp_path), found(tmp_path / "orbax", tmp_path), dummy):
        tree = serve(source, tmp_path, LAYOUTS[0])
        assert_same_tree(
            jax.tree.map(np.asarray, tree),
            host(load_params(source, load_config(source), BF16, keep)),
        )
        assert files(tmp_path) == []
    serve(dummy, tmp_path, LAYOUTS[1])
    assert files(tmp_path) == []
    for number, source in enumerate((found(hf, tmp_path), found(tmp_path / "orbax", tmp_path)), 1):
        serve(source, tmp_path, LAYOUTS[1])
        assert len(files(tmp_path)) == number


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def test_packing_in_memory_that_cannot_be_kept(tmp_path, caplog):
    model = write_model(tmp_path / "m", tiny_tensors(tiny_config()))
    (tmp_path / "weights").write_text("in the way")
    source = found(model, tmp_path)
    with caplog.at_level(logging.WARNING):
        tree = serve(source, tmp_path, LAYOUTS[1])
    assert "not keeping the weights for the next start" in caplog.text
    plain = load_params(source, load_config(source), BF16, keep)
    assert_same_tree(canonical(tree, LAYOUTS[1]), plain)
    assert json.loads((model / "config.json").read_text())["vocab_size"] == 29

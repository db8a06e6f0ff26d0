from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.config import EngineConfig
from jaxserve.loading import load_config, load_params, load_tokenizer, resolve
from jaxserve.loading.convert import convert
from tests.loading.gguf_files import write_gguf
from tests.loading.tiny import HF, assert_same_tree, keep

F32 = np.dtype(np.float32)


def loaded(path: Path, dtype=F32):
    source = resolve(EngineConfig(model=str(path)))
    config = load_config(source)
    return source, config, load_params(source, config, dtype, keep)


def test_gguf_to_hf_to_orbax_to_hf(tmp_path, golden):
    original = golden / "llama-gqa"
    gguf = write_gguf(tmp_path / "m.gguf", original)
    hf, orbax, back = tmp_path / "hf", tmp_path / "orbax", tmp_path / "back"
    convert(str(gguf), str(hf), "hf", "float32")
    convert(str(hf), str(orbax), "orbax", "float32")
    convert(str(orbax), str(back), "hf", "float32")

    want = load_file(original / "model.safetensors")
    for directory in (hf, back):
        got = load_file(directory / "model.safetensors")
        assert set(got) == set(want)
        assert all((got[name] == want[name]).all() for name in want)
    sources, configs, trees = zip(*(loaded(p) for p in (hf, orbax, back)), strict=True)
    assert [source.format for source in sources] == ["hf", "orbax", "hf"]
    assert configs[0] == configs[1] == configs[2]
    assert_same_tree(trees[1], trees[0])
    assert_same_tree(trees[2], trees[0])
    tokenizers = [load_tokenizer(source) for source in sources]
    assert len({tuple(t.encode("the which 12\n")) for t in tokenizers}) == 1
    assert len({t.chat_template for t in tokenizers}) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "m.gguf", "orbax"]


@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_dtype_is_bfloat16_by_default(tmp_path, golden, format):
    convert(str(golden / "qwen3-llama3rope"), str(tmp_path / "out"), format)
    _, config, tree = loaded(tmp_path / "out", np.dtype(ml_dtypes.bfloat16))
    _, want_config, want = loaded(golden / "qwen3-llama3rope")
    assert config == want_config
    assert (tree["head"] == want["head"].astype(ml_dtypes.bfloat16)).all()
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["torch_dtype"] == "bfloat16"


def test_gguf_to_orbax(tmp_path, golden):
    gguf = write_gguf(tmp_path / "m.gguf", golden / "llama-gqa")
    convert(str(gguf), str(tmp_path / "out"), "orbax", "float32")
    assert_same_tree(loaded(tmp_path / "out")[2], loaded(golden / "llama-gqa")[2])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_dummy_weights_can_be_written(tmp_path):
    (tmp_path / "mini.json").write_text(json.dumps(HF))
    convert(str(tmp_path / "mini.json"), str(tmp_path / "out"), load_format="dummy")
    assert loaded(tmp_path / "out")[0].format == "hf"


def test_a_generation_config_is_kept(tmp_path, golden):
    convert(str(golden / "llama-gqa"), str(tmp_path / "out"))
    name = "generation_config.json"
    assert (tmp_path / "out" / name).read_text() == (golden / "llama-gqa" / name).read_text()


def test_an_empty_directory_is_a_destination(tmp_path, golden):
    (tmp_path / "out").mkdir()
    convert(str(golden / "llama-gqa"), str(tmp_path / "out"))
    assert loaded(tmp_path / "out")[0].format == "hf"


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_nothing_is_overwritten(tmp_path, golden, kind):
    target = tmp_path / "out"
    if kind == "directory":
        target.mkdir()
        (target / "precious").write_text("x")
    else:
        target.write_text("x")
    with pytest.raises(ValueError, match="is there already; give a new directory"):
        convert(str(golden / "llama-gqa"), str(target))


def test_a_failure_leaves_nothing(tmp_path, golden):
    gguf = write_gguf(tmp_path / "m.gguf", golden / "llama-gqa", drop=("output_norm.weight",))
    for format in ("hf", "orbax"):
        with pytest.raises(ValueError, match="missing tensors"):
            convert(str(gguf), str(tmp_path / "out"), format)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="format='gguf' is not one of hf, orbax"):
        convert("x", str(tmp_path / "out"), "gguf")

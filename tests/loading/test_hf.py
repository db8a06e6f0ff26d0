from __future__ import annotations

import json
import logging
import time

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.config import EngineConfig
from jaxserve.loading import load_config, load_params, resolve
from jaxserve.loading.canonical import canonical_to_hf
from jaxserve.loading.hf import TensorFiles, load_hf_params, save_hf, write_weights
from jaxserve.models.config import ModelConfig
from tests.loading.tiny import (
    HF,
    assert_same_tree,
    flat,
    keep,
    tiny_config,
    tiny_tensors,
    write_model,
)
from tests.oracle import Oracle

F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
F16 = np.dtype(np.float16)


def test_leaves_by_hand(tmp_path):
    config = tiny_config(model_type="qwen2")
    hf = tiny_tensors(config)
    tree = load_hf_params(write_model(tmp_path, hf, model_type="qwen2"), config, F32, keep)
    layer, group, dim = tree["layers"][1], 3, 10
    name = "model.layers.1.self_attn"
    for kv in range(2):
        for g in range(group):
            rows = slice((kv * group + g) * dim, (kv * group + g + 1) * dim)
            assert (layer["attn"]["qkv"][kv, g] == hf[f"{name}.q_proj.weight"][rows]).all()
            assert (layer["attn"]["qkv_bias"][kv, g] == hf[f"{name}.q_proj.bias"][rows]).all()
            assert (layer["attn"]["out"][:, kv, g] == hf[f"{name}.o_proj.weight"][:, rows]).all()
        rows = slice(kv * dim, (kv + 1) * dim)
        assert (layer["attn"]["qkv"][kv, group] == hf[f"{name}.k_proj.weight"][rows]).all()
        assert (layer["attn"]["qkv"][kv, group + 1] == hf[f"{name}.v_proj.weight"][rows]).all()
        assert (layer["attn"]["qkv_bias"][kv, group + 1] == hf[f"{name}.v_proj.bias"][rows]).all()
    assert (layer["mlp"]["gate_up"][:, 0] == hf["model.layers.1.mlp.gate_proj.weight"]).all()
    assert (layer["mlp"]["gate_up"][:, 1] == hf["model.layers.1.mlp.up_proj.weight"]).all()
    assert (layer["mlp"]["down"] == hf["model.layers.1.mlp.down_proj.weight"]).all()
    assert (layer["attn_norm"] == hf["model.layers.1.input_layernorm.weight"]).all()
    assert (tree["head"] == hf["lm_head.weight"]).all()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip(tmp_path, architecture, shards):
    config = tiny_config(model_type=architecture)
    hf = tiny_tensors(config)
    source = write_model(tmp_path / "a", hf, shards, model_type=architecture)
    tree = load_hf_params(source, config, F32, keep)
    back = canonical_to_hf(tree, config)
    assert set(back) == set(hf)
    assert all((back[name] == hf[name]).all() for name in hf)

    (tmp_path / "b").mkdir()
    save_hf(tmp_path / "b", config, tree, None)
    again = resolve(EngineConfig(model=str(tmp_path / "b")))
    assert load_config(again) == config
    assert_same_tree(load_params(again, load_config(again), F32, keep), tree)


def test_put_sees_every_leaf_once_in_order_of_layers(tmp_path):
    config = tiny_config()
    seen = []
    write_model(tmp_path, tiny_tensors(config))
    tree = load_hf_params(tmp_path, config, F32, lambda path, array: seen.append(path) or "put")
    assert seen == list(flat(tree))
    assert set(flat(tree).values()) == {"put"}


def test_shards_are_written_by_size(tmp_path):
    tensors = {f"t{i}": np.full((10,), i, np.float32) for i in range(5)}
    write_weights(tmp_path, tensors.items(), max_shard_bytes=80)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert index["weight_map"]["t4"] == "model-00003-of-00003.safetensors"


# Golden numbers of the committed models: logits, not only shapes.


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-llama3rope"])
def test_golden_prompt_scores(golden, name):
    source = resolve(EngineConfig(model=str(golden / name)))
    config = load_config(source)
    oracle = Oracle(config, load_params(source, config, F32, keep))
    for case in json.loads((golden / name / "golden.json").read_text())["cases"]:
        ids = case["prompt_ids"]
        logprobs = oracle.logprobs(ids)
        got = [logprobs[i, token] for i, token in enumerate(ids[1:])]
        np.testing.assert_allclose(got, case["prompt_logprobs"], atol=2e-4)


def test_logits_with_a_head_dim_of_its_own(tmp_path):
    """head_dim=10 is not 24 / 6: a scale or rotation by the wrong size would show here."""
    config = tiny_config(head_dim=10)
    tree = load_hf_params(write_model(tmp_path, tiny_tensors(config)), config, F32, keep)
    assert tree["layers"][0]["attn"]["qkv"].shape == (2, 5, 10, 24)
    assert np.isfinite(Oracle(config, tree).logits([1, 2, 3])).all()


# Tied embeddings.


def test_tied_without_head(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    write_model(tmp_path, tiny_tensors(config), tie_word_embeddings=True)
    assert "head" not in load_hf_params(tmp_path, config, F32, keep)


def test_tied_with_head_ignores_it_and_says_so(tmp_path, caplog):
    config = tiny_config(tie_word_embeddings=True)
    hf = tiny_tensors(config)
    extra = {**hf, "lm_head.weight": np.zeros((29, 24), np.float32)}
    write_model(tmp_path, extra, tie_word_embeddings=True)
    with caplog.at_level(logging.INFO):
        tree = load_hf_params(tmp_path, config, F32, keep)
    assert "head" not in tree
    assert "lm_head.weight is ignored" in caplog.text


def test_untied_with_head_has_its_own(tmp_path):
    config = tiny_config()
    hf = tiny_tensors(config)
    tree = load_hf_params(write_model(tmp_path, hf), config, F32, keep)
    assert (tree["head"] == hf["lm_head.weight"]).all()
    assert (tree["head"] != tree["embed"]).any()


def test_untied_without_head_is_an_error(tmp_path):
    config = tiny_config()
    hf = tiny_tensors(config)
    del hf["lm_head.weight"]
    with pytest.raises(ValueError, match=r"missing lm_head\.weight .*tie_word_embeddings"):
        load_hf_params(write_model(tmp_path, hf), config, F32, keep)


# Damaged checkpoints: every one fails fast and by name.


def broken(tmp_path, message):
    start = time.monotonic()
    with pytest.raises(ValueError, match=message):
        load_hf_params(tmp_path, tiny_config(), F32, pytest.fail)
    assert time.monotonic() - start < 10


@pytest.fixture
def sharded(tmp_path):
    return write_model(tmp_path, tiny_tensors(tiny_config()), shards=3)


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    broken(sharded, r"model-00002-of-00003\.safetensors is missing")


@pytest.mark.parametrize("keep_bytes", [0, 4, 200, -1])
def test_truncated_shard(sharded, keep_bytes):
    shard = sharded / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep_bytes])
    broken(sharded, r"model-00003-of-00003\.safetensors is not a complete safetensors file")


def test_index_names_a_file_that_is_absent(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of", "model-00009-of", 1))
    broken(sharded, r"model-00009-of-00003\.safetensors is missing")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_bad_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    broken(sharded, "index.json")


def test_all_wrong_tensors_are_named_at_once(tmp_path):
    hf = tiny_tensors(tiny_config())
    hf["model.layers.0.mlp.gate.weight"] = hf.pop("model.layers.0.mlp.gate_proj.weight")
    hf["model.norm.weight"] = np.zeros((25,), np.float32)
    hf["model.layers.1.mlp.up_proj.weight"] = np.zeros((40, 24), np.int8)
    write_model(tmp_path, hf)
    broken(
        tmp_path,
        r"missing model\.layers\.0\.mlp\.gate_proj\.weight; "
        r"unexpected model\.layers\.0\.mlp\.gate\.weight; "
        r"model\.layers\.1\.mlp\.up_proj\.weight has type I8; .*"
        r"model\.norm\.weight has shape \(25,\), not \(24,\)",
    )


def test_rotary_buffers_are_ignored(tmp_path):
    hf = tiny_tensors(tiny_config())
    hf["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros((5,), np.float32)
    load_hf_params(write_model(tmp_path, hf), tiny_config(), F32, keep)


def test_pytorch_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    broken(tmp_path, r"PyTorch weights only \(pytorch_model\.bin\)")


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "llama"', "[1]", "null", "\x00"])
def test_bad_config_json(tmp_path, text):
    write_model(tmp_path, tiny_tensors(tiny_config()))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(resolve(EngineConfig(model=str(tmp_path))))


# Types.


@pytest.fixture
def mixed_types(tmp_path):
    generator = np.random.default_rng(3)
    values = generator.standard_normal((7, 5)).astype(np.float32)
    tensors = {
        "BF16": values.astype(BF16),
        "F16": values.astype(F16),
        "F32": values,
        "F64": values.astype(np.float64),
        "I8": values.astype(np.int8),
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0, 3), np.float16),
    }
    save_file(tensors, tmp_path / "mixed", metadata={"format": "pt", "note": "x"})
    return tmp_path / "mixed", tensors


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F64", "scalar", "empty"])
def test_types_convert_exactly(mixed_types, dtype, name):
    file, tensors = mixed_types
    with TensorFiles([file]) as opened:
        got = opened.read(name, dtype)
        assert opened.shape(name) == tensors[name].shape
    assert got.dtype == dtype
    assert got.shape == tensors[name].shape
    assert got.tobytes() == tensors[name].astype(dtype).tobytes()


def test_bfloat16_widens_by_shifting(mixed_types):
    file, tensors = mixed_types
    with TensorFiles([file]) as opened:
        got = opened.read("BF16", F32)
    bits = tensors["BF16"].view(np.uint16).astype(np.uint32) << 16
    assert (got.view(np.uint32) == bits).all()


def test_integers_are_refused(mixed_types):
    with (
        TensorFiles([mixed_types[0]]) as opened,
        pytest.raises(ValueError, match="I8 has type I8; weights must be F16"),
    ):
        opened.read("I8", F32)


def test_float16_overflow_is_an_error(tmp_path):
    hf = tiny_tensors(tiny_config())
    hf["model.norm.weight"][3] = 1e5
    write_model(tmp_path, hf)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has 1 values beyond float16"):
        load_hf_params(tmp_path, tiny_config(), F16, keep)
    load_hf_params(tmp_path, tiny_config(), BF16, keep)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_dtype_is_honoured_for_all_weights(tmp_path, dtype):
    config = tiny_config()
    hf = tiny_tensors(config)
    hf = {name: array.astype([F32, BF16, F16][i % 3]) for i, (name, array) in enumerate(hf.items())}
    tree = load_hf_params(write_model(tmp_path, hf), config, dtype, keep)
    assert {leaf.dtype for leaf in flat(tree).values()} == {dtype}


def test_config_is_hashable_and_model_type_is_kept():
    assert hash(tiny_config()) == hash(ModelConfig.from_hf(HF))

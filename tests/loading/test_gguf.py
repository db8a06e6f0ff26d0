from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.config import EngineConfig
from jaxserve.loading import load_config, load_params, load_tokenizer, resolve
from jaxserve.loading.canonical import build_tree, fuse, get
from jaxserve.loading.gguf_config import hf_config
from jaxserve.models.config import ModelConfig
from tests.loading.gguf_files import write_gguf
from tests.loading.tiny import assert_same_tree, keep
from tests.oracle import Oracle

F32 = np.dtype(np.float32)
PARA = (
    "The quick growth of cities in the nineteenth century changed how people lived and worked. "
    "Factories needed many hands, and families moved from farms to crowded streets where the air "
    "was dark with smoke. New laws slowly improved water, housing and schools, and by the end of "
    "the century most large towns had parks, trams and public libraries. Historians still argue "
    "about whether ordinary workers were better off than their parents had been, because wages "
    "rose while life in the slums stayed short and hard."
)


def engine_config(path: Path, tmp_path: Path, dtype: str = "float32") -> EngineConfig:
    return EngineConfig(model=str(path), dtype=dtype, cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def llama(golden):
    return golden / "llama-gqa"


@pytest.fixture
def qwen3(golden):
    return golden / "qwen3-llama3rope"


def hf_tree(directory: Path, change=lambda tensor: tensor):
    source = resolve(EngineConfig(model=str(directory)))
    config = load_config(source)
    tensors = load_file(directory / "model.safetensors")
    return build_tree(
        config, lambda leaf: fuse(leaf, lambda name: change(tensors[name]), np.dtype(np.float32))
    )


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_tree_is_that_of_the_original_bit_for_bit(tmp_path, request, name):
    original = request.getfixturevalue(name)
    source = resolve(engine_config(write_gguf(tmp_path / "m.gguf", original), tmp_path))
    config = load_config(source)
    want = load_config(resolve(EngineConfig(model=str(original))))
    assert config.architecture == want.architecture
    assert (config.head_dim, config.rms_eps, config.rope.theta) == (
        want.head_dim,
        want.rms_eps,
        want.rope.theta,
    )
    assert config.tie_embeddings == want.tie_embeddings
    assert config.eos_token_ids == (258,)
    assert_same_tree(load_params(source, config, F32, keep), hf_tree(original))


@pytest.mark.parametrize("quantisation", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_blocks_are_expanded_before_the_rows_are_put_back(tmp_path, llama, quantisation):
    kind = gguf.GGMLQuantizationType[quantisation]
    block = gguf.GGML_QUANT_SIZES[kind][0]

    def expected(tensor: np.ndarray) -> np.ndarray:
        if tensor.ndim == 1 or tensor.shape[1] % block:
            return tensor
        return gguf.dequantize(gguf.quantize(tensor, kind), kind)

    path = write_gguf(tmp_path / "m.gguf", llama, quantisation=quantisation)
    source = resolve(engine_config(path, tmp_path))
    got = load_params(source, load_config(source), F32, keep)
    assert_same_tree(got, hf_tree(llama, expected))


def test_tokenizer_is_the_original(tmp_path, llama):
    source = resolve(engine_config(write_gguf(tmp_path / "m.gguf", llama), tmp_path))
    original = load_tokenizer(resolve(EngineConfig(model=str(llama))))
    got = load_tokenizer(source)
    text = "the  which 12 \n é<|im_end|> you"
    assert got.encode(text) == original.encode(text)
    assert got.eos_token_ids == (258,)
    assert not got.adds_bos
    assert got.chat_template == "{{ messages[0]['content'] }}"


def test_metadata_is_translated_once_per_file(tmp_path, llama):
    path = write_gguf(tmp_path / "m.gguf", llama)
    first = resolve(engine_config(path, tmp_path))
    assert sorted(file.name for file in first.files.iterdir()) == [
        "config.json",
        "generation_config.json",
        "source.json",
        "tensors.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    (first.files / "source.json").write_text("mine")
    again = resolve(engine_config(path, tmp_path, "auto"))
    assert again.files == first.files
    assert (again.files / "source.json").read_text() == "mine"
    tree = load_params(again, load_config(again), np.dtype(ml_dtypes.bfloat16), keep)
    assert tree["norm"].dtype == ml_dtypes.bfloat16
    write_gguf(path, llama, metadata={"general.name": "another"})
    assert resolve(engine_config(path, tmp_path)).files != first.files


def test_weights_are_rounded_once(tmp_path, llama):
    """From the file's own type to the one asked for, with no other between them."""
    source = resolve(engine_config(write_gguf(tmp_path / "m.gguf", llama), tmp_path))
    config = load_config(source)
    exact = load_params(source, config, F32, keep)
    half = np.dtype(np.float16)
    got = load_params(source, config, half, keep)
    assert_same_tree(got, build_tree(config, lambda leaf: get(exact, leaf.path).astype(half)))


def test_an_index_that_does_not_fit_the_file(tmp_path, llama):
    source = resolve(engine_config(write_gguf(tmp_path / "m.gguf", llama), tmp_path))
    config = load_config(source)
    whole = source.path.read_bytes()
    source.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"the index of .* does not fit it at model"):
        load_params(source, config, F32, keep)
    source.path.write_bytes(whole)
    index = json.loads((source.files / "tensors.json").read_text())
    del index["model.norm.weight"]
    (source.files / "tensors.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"does not fit it at model\.norm\.weight"):
        load_params(source, config, F32, keep)


def test_a_type_that_cannot_be_expanded(tmp_path, llama, monkeypatch):
    def refuse(data, kind):
        raise NotImplementedError

    path = write_gguf(tmp_path / "m.gguf", llama, quantisation="Q8_0")
    monkeypatch.setattr(gguf, "dequantize", refuse)
    with pytest.raises(ValueError, match=r"is quantised as .*, which cannot be read"):
        resolve(engine_config(path, tmp_path))


def test_a_failed_translation_leaves_nothing(tmp_path, llama):
    path = write_gguf(tmp_path / "m.gguf", llama, metadata={"tokenizer.ggml.pre": "unheard-of"})
    with pytest.raises(ValueError, match="'unheard-of' is not known"):
        resolve(engine_config(path, tmp_path))
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": {"general.architecture": "gemma"}}, "'gemma' is not supported"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "dimension_count=8"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"metadata": {"llama.block_count": None}}, "has no llama.block_count"),
        ({"metadata": {"llama.attention.head_count_kv": [2, 1]}}, "differ in heads"),
        ({"metadata": {"llama.rope.scaling.type": "longrope"}}, "'longrope' is not supported"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "'bert' is not supported"),
        ({"metadata": {"tokenizer.ggml.pre": None}}, "None is not known"),
        ({"metadata": {"tokenizer.ggml.tokens": None}}, "no vocabulary"),
        ({"metadata": {"split.count": 3}}, "split GGUF"),
        ({"drop": ("blk.1.ffn_up.weight",)}, r"missing tensors \['model.layers.1.mlp.up_proj"),
        ({"drop": ("token_embd.weight",)}, "no tensor token_embd.weight"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(64, np.float32)}}, "unexpected .*q_proj.bias"),
        ({"extra": {"blk.0.moe.weight": np.zeros(64, np.float32)}}, "tensor 'blk.0.moe.weight'"),
        ({"metadata": {"llama.feed_forward_length": 71}}, r"shape \(72, 64\), not \(71, 64\)"),
        ({"extra": {"rope_freqs.weight": np.full(8, 3, np.float32)}}, "rope_freqs.weight is not"),
    ],
)
def test_refused(tmp_path, llama, changes, message):
    path = write_gguf(tmp_path / "m.gguf", llama, **changes)
    with pytest.raises(ValueError, match=message):
        resolve(engine_config(path, tmp_path))


@pytest.mark.parametrize("keep_share", [0.001, 0.02, 0.5, 0.999])
def test_truncated_file(tmp_path, llama, keep_share):
    path = write_gguf(tmp_path / "m.gguf", llama)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep_share)])
    start = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(f"{path} is not a complete GGUF file")):
        resolve(engine_config(path, tmp_path))
    assert time.monotonic() - start < 10


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="does not begin like a GGUF file"):
        resolve(engine_config(path, tmp_path))


# Metadata alone.


class Tensor:
    shape = (24, 29)


def from_metadata(rope_factors=None, arch="llama", **options):
    base = {
        "attention.head_count": 6,
        "embedding_length": 24,
        "feed_forward_length": 40,
        "block_count": 2,
        "context_length": 16384,
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    }
    metadata = {f"{arch}.{key}": value for key, value in {**base, **options}.items()}
    metadata |= {"general.architecture": arch, "tokenizer.ggml.eos_token_id": 2}
    metadata |= {"tokenizer.ggml.eot_token_id": 5}
    tensors = {"token_embd.weight": Tensor()}
    return ModelConfig.from_hf(hf_config(metadata.get, tensors, rope_factors))


def test_metadata_defaults():
    config = from_metadata()
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (6, 4, 10000)
    assert config.tie_embeddings
    assert config.eos_token_ids == (2, 5)
    assert config.rms_eps == 1e-5


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised_by_its_divisors(factor):
    frequencies = [500000 ** -(2 * i / 64) for i in range(32)]
    divisors = []
    for wavelength in (2 * math.pi / f for f in frequencies):
        smooth = min(max((8192 / wavelength - 1) / 3, 0), 1)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    config = from_metadata(
        np.asarray(divisors, np.float32),
        **{"attention.key_length": 64, "rope.freq_base": 500000.0},
    )
    assert config.rope.kind == "llama3"
    assert config.rope.factor == factor
    assert config.rope.original_max_position == 8192


def test_linear_and_yarn_scaling():
    linear = from_metadata(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    assert (linear.rope.kind, linear.rope.factor) == ("linear", 4.0)
    yarn = from_metadata(
        **{
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 4096,
        }
    )
    assert (yarn.rope.kind, yarn.rope.original_max_position) == ("yarn", 4096)
    assert from_metadata(**{"rope.scaling.type": "none"}).rope.kind == "default"


def test_a_window_makes_it_mistral():
    config = from_metadata(**{"attention.sliding_window": 16})
    assert (config.architecture, config.sliding_windows) == ("mistral", (16, 16))


# The demo model.


def test_demo_model(demo_source):
    config = load_config(demo_source)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.tie_embeddings) == (100000, True)
    assert (config.max_position, config.eos_token_ids) == (8192, (2,))


@pytest.mark.slow
def test_demo_model_scores_a_paragraph():
    source = resolve(EngineConfig(dtype="float32"))
    config = load_config(source)
    ids = load_tokenizer(source).encode(PARA)
    assert len(ids) == 96
    logprobs = Oracle(config, load_params(source, config, F32, keep)).logprobs(ids)
    nll = -np.mean([logprobs[i, token] for i, token in enumerate(ids[1:])])
    assert nll == pytest.approx(3.7696, abs=2e-3)

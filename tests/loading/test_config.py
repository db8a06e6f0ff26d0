from __future__ import annotations

import pytest

from jaxserve.models.config import ModelConfig
from tests.loading.tiny import HF, tiny_config


@pytest.mark.parametrize("given", [{"head_dim": None}, {}])
def test_head_dim_defaults_to_hidden_over_heads(given):
    config = {key: value for key, value in HF.items() if key != "head_dim"}
    assert ModelConfig.from_hf({**config, **given}).head_dim == 24 // 6
    assert tiny_config(head_dim=32).head_dim == 32


def test_kv_heads_default_to_heads():
    config = {key: value for key, value in HF.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(config).num_kv_heads == 6


@pytest.mark.parametrize(
    ("architecture", "bias", "norm"),
    [("llama", 0, 0), ("mistral", 0, 0), ("qwen2", 1, 0), ("qwen3", 0, 1)],
)
def test_architectures(architecture, bias, norm):
    config = tiny_config(model_type=architecture)
    assert (config.architecture, config.qkv_bias, config.qk_norm) == (architecture, bias, norm)


def test_architecture_from_the_class_name():
    config = {**HF, "model_type": None, "architectures": ["Qwen2ForCausalLM"]}
    assert ModelConfig.from_hf(config).architecture == "qwen2"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 16}, (None, None)),
        ({"model_type": "mistral", "sliding_window": 16}, (16, 16)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None)),
        ({"model_type": "mistral"}, (4096, 4096)),
        ({"model_type": "qwen2", "sliding_window": 16}, (None, None)),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 16),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 16,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (16, None),
        ),
    ],
)
def test_sliding_windows(changes, windows):
    config = tiny_config(**changes)
    assert config.sliding_windows == windows
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("eos", [2, [2, 7], None])
@pytest.mark.parametrize(
    "rope",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
)
def test_round_trip(eos, rope):
    config = tiny_config(eos_token_id=eos, rope_scaling=rope, rope_theta=5e5)
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("in_config", "in_generation", "want"),
    [
        (2, None, (2,)),
        ([2, 7], None, (2, 7)),
        (2, {"eos_token_id": [3, 4]}, (3, 4)),
        (2, {"eos_token_id": 5}, (5,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {}, (2,)),
        (None, None, ()),
    ],
)
def test_eos_of_the_generation_config_wins(in_config, in_generation, want):
    config = {**HF, "eos_token_id": in_config}
    assert ModelConfig.from_hf(config, in_generation).eos_token_ids == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported; supported are llama"),
        ({"model_type": None}, "None is not supported"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads=4"),
        ({"head_dim": 9}, "head_dim=9 is odd"),
        ({"head_dim": None, "hidden_size": 25}, "no head_dim"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"eos_token_id": 29}, "eos_token_id 29 is outside the vocabulary of 29"),
        ({"eos_token_id": "2"}, "eos_token_id='2'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types",
        ),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)

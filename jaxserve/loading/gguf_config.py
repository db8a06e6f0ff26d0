"""A GGUF file's metadata as a Hugging Face config.json.

Knows llama.cpp's key names.  Does not read files or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxserve.loading.arrays import Array
from jaxserve.models.rope import RopeConfig, inv_freq

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture` values that can be read; Mistral and SmolLM files say "llama"."""


def hf_config(
    value: Callable[[str], Any], tensors: Mapping[str, Any], rope_factors: Array | None
) -> dict[str, Any]:
    """Translate metadata to the entries of a config.json.

    Args:
        value: the metadata value of a key, or None.
        tensors: name -> tensor; only the embedding's shape and the presence of "output.weight"
            are used.
        rope_factors: divisors of the rotary frequencies, where the file has them.

    Raises:
        ValueError: an architecture or option that is not supported, or a missing key.
    """
    arch = value("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"GGUF architecture {arch!r} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )

    def option(key: str) -> Any:
        return value(f"{arch}.{key}")

    def needed(key: str) -> Any:
        if option(key) is None:
            raise ValueError(f"the GGUF file has no {arch}.{key}; convert the model again")
        return option(key)

    if option("expert_count"):
        raise ValueError(f"mixture-of-experts models ({arch}.expert_count) are not supported")
    if "token_embd.weight" not in tensors:
        raise ValueError("the GGUF file has no tensor token_embd.weight")
    heads, hidden = needed("attention.head_count"), needed("embedding_length")
    kv_heads = option("attention.head_count_kv") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise ValueError("GGUF models whose layers differ in heads are not supported")
    head_dim = option("attention.key_length") or hidden // heads
    if (option("rope.dimension_count") or head_dim) != head_dim:
        raise ValueError(
            f"{arch}.rope.dimension_count={option('rope.dimension_count')} rotates only part of "
            f"head_dim={head_dim}, which is not supported"
        )
    window = option("attention.sliding_window")
    return {
        "model_type": "mistral" if window and arch == "llama" else arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": needed("feed_forward_length"),
        "num_hidden_layers": needed("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": needed("context_length"),
        "rms_norm_eps": _decimal(needed("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "sliding_window": window or None,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(value),
        "rope_theta": _decimal(option("rope.freq_base") or 10000.0),
        "rope_scaling": _rope_scaling(option, head_dim, rope_factors),
    }


def _decimal(value: float) -> float:
    """The shortest decimal of a stored float32: 1e-5, not 9.99999974e-6."""
    return float(str(np.float32(value)))


def _end_tokens(value: Callable[[str], Any]) -> list[int] | None:
    """End of text, of turn and of message: llama.cpp stops at each of them."""
    ids = [value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return list(dict.fromkeys(i for i in ids if i is not None)) or None


def _rope_scaling(
    option: Callable[[str], Any], head_dim: int, rope_factors: Array | None
) -> dict[str, Any] | None:
    kind = option("rope.scaling.type") or "none"
    if rope_factors is not None:
        return _llama3(rope_factors, head_dim, _decimal(option("rope.freq_base") or 10000.0))
    if kind == "none":
        old_factor = option("rope.scale_linear")
        return {"rope_type": "linear", "factor": float(old_factor)} if old_factor else None
    factor = option("rope.scaling.factor")
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": option("rope.scaling.original_context_length"),
            "beta_fast": option("rope.scaling.yarn_beta_fast"),
            "beta_slow": option("rope.scaling.yarn_beta_slow"),
        }
        return {key: number for key, number in scaling.items() if number is not None}
    return {"rope_type": kind, "factor": factor}


def _llama3(factors: Array, head_dim: int, theta: float) -> dict[str, Any]:
    """Find the llama3 parameters that give these divisors; the file holds only the result."""
    guess = RopeConfig(
        kind="llama3",
        theta=theta,
        factor=float(factors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    plain = inv_freq(RopeConfig(theta=theta), head_dim)
    if factors.shape != plain.shape or not np.allclose(
        plain / inv_freq(guess, head_dim), factors, rtol=1e-4
    ):
        raise ValueError(
            "the GGUF file's rope_freqs.weight is not the scaling of Llama 3.1 to 3.3, the only "
            "one that is supported; use the model's Hugging Face directory"
        )
    return {
        "rope_type": "llama3",
        "factor": guess.factor,
        "low_freq_factor": guess.low_freq_factor,
        "high_freq_factor": guess.high_freq_factor,
        "original_max_position_embeddings": guess.original_max_position,
    }

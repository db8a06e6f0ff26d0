"""A tiny model on disk for a server process: random weights, a byte-level tokenizer, a template.

Its head prefers printable characters, so that answers are text; any token can be forced with
`logit_bias`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxserve.loading.canonical import leaves
from jaxserve.models.config import ModelConfig
from jaxserve.tokenizer import _byte_chars

VOCAB = 300
END_OF_TEXT, IM_START, IM_END, THINK, END_THINK = range(256, 261)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MAX_POSITION = 512
POISON = 13
"""The token, a carriage return, in whose presence a model made with `poison` yields NaN."""

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITION,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": IM_END,
}


def make_model(
    directory: Path,
    *,
    template: str | None = CHATML,
    poison: bool = False,
    seed: int = 0,
    tokenizer_config: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a Hugging Face directory.

    Args:
        directory: where; it is made.
        template: Jinja chat template; None leaves the model without one.
        poison: let the embedding of `POISON` be NaN, so that a request whose context has it fails.
        seed: of the weights.
        tokenizer_config: further entries of tokenizer_config.json.
        changes: of `CONFIG`, such as another `eos_token_id`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(ModelConfig.from_hf(config), seed)
    if poison:
        tensors["model.embed_tokens.weight"][POISON] = np.nan
    save_file(tensors, directory / "model.safetensors")
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "bos_token": None,
        "add_bos_token": False,
        "model_max_length": MAX_POSITION,
        "chat_template": template,
        **(tokenizer_config or {}),
    }
    text = json.dumps({name: value for name, value in settings.items() if value is not None})
    (directory / "tokenizer_config.json").write_text(text)
    return directory


def random_tensors(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Weights large enough that greedy tokens vary and top logits are well apart."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.standard_normal(shape) * 0.15 + ("norm" in name)).astype(np.float32)
        for leaf in leaves(config)
        for name, shape in leaf.sources
    }
    if "lm_head.weight" in tensors:
        others = [token for token in range(config.vocab_size) if not 32 <= token < 127]
        tensors["lm_head.weight"][others] *= 0.1
    return tensors


def byte_tokenizer() -> Tokenizer:
    """A token per byte, then the special and the added ones, in the order of their constants."""
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    vocab |= {text: 256 + i for i, text in enumerate((*SPECIAL, *ADDED))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text) for text in ADDED])
    return tokenizer

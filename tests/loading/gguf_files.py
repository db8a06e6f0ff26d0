"""Writing GGUF files for tests, the way llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter does to the q and k rows of llama models."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem == "model.embed_tokens":
        return f"token_embd.{kind}"
    if stem in ("model.norm", "lm_head"):
        return {"model.norm": "output_norm", "lm_head": "output"}[stem] + f".{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def write_gguf(
    path: Path,
    source: Path,
    metadata: dict[str, Any] | None = None,
    quantisation: str = "F32",
    extra: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Write the golden model of a directory as a GGUF file.

    Args:
        path: of the file.
        source: Hugging Face directory with a byte-level tokenizer.
        metadata: further entries, or other values; None removes one.
        quantisation: of the matrices whose rows fill whole blocks; the others stay F32.
        extra: further tensors by GGUF name.
        drop: tensors to leave out, by GGUF name.
    """
    hf = json.loads((source / "config.json").read_text())
    arch = hf["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    entries = {
        f"{arch}.block_count": hf["num_hidden_layers"],
        f"{arch}.context_length": hf["max_position_embeddings"],
        f"{arch}.embedding_length": hf["hidden_size"],
        f"{arch}.feed_forward_length": hf["intermediate_size"],
        f"{arch}.attention.head_count": hf["num_attention_heads"],
        f"{arch}.attention.head_count_kv": hf["num_key_value_heads"],
        f"{arch}.attention.key_length": hf["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": hf["rms_norm_eps"],
        f"{arch}.rope.freq_base": hf["rope_parameters"]["rope_theta"],
        f"{arch}.rope.dimension_count": hf["head_dim"],
        **tokenizer_entries(source),
        **(metadata or {}),
    }
    for key, value in entries.items():
        add(writer, key, value)
    kind = gguf.GGMLQuantizationType[quantisation]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    for name, tensor in load_file(source / "model.safetensors").items():
        if arch == "llama" and "q_proj" in name:
            tensor = permute(tensor, hf["num_attention_heads"])
        if arch == "llama" and "k_proj" in name:
            tensor = permute(tensor, hf["num_key_value_heads"])
        if gguf_name(name) in drop:
            continue
        if tensor.ndim == 2 and tensor.shape[1] % block == 0:
            writer.add_tensor(gguf_name(name), gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), tensor)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_entries(source: Path) -> dict[str, Any]:
    """The vocabulary of a tokenizer.json as metadata."""
    data = json.loads((source / "tokenizer.json").read_text())
    special = {token["id"] for token in data["added_tokens"]}
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)

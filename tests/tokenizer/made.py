"""Tokenizers made in memory for tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.loading.gguf_tokenizer import write_tokenizer
from jaxserve.tokenizer import Tokenizer, _byte_chars

BOS, EOS, THINK = 256, 257, 258
CHATML = (
    "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


def byte_tokenizer(config: dict | None = None, template: str | None = None) -> Tokenizer:
    """A token per byte, special <bos> and <eos>, and <think>, which is ordinary."""
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    vocab |= {"<bos>": BOS, "<eos>": EOS, "<think>": THINK}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<bos>", "<eos>")])
    backend.add_tokens([AddedToken("<think>")])
    named = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "lstrip": False}}
    return Tokenizer(backend, named if config is None else config, template)


PIECES = ["▁", *"abcdehlortw", "he", "ll", "▁t", "▁the", "▁he", "or", "▁w", "▁wor"]


def sentencepiece_metadata(**changes: object) -> dict[str, object]:
    """A little Llama 2 vocabulary as GGUF metadata: byte fallback, scores instead of merges."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *PIECES,
        "[INST]",
    ]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    longest = [float(len(token)) for token in tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": longest,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def sentencepiece(directory: Path, **changes: object) -> Tokenizer:
    """The tokenizer of `sentencepiece_metadata`."""
    write_tokenizer(sentencepiece_metadata(**changes).get, directory)
    return Tokenizer.from_directory(directory)

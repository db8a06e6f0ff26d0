"""Tokenizers with marks for reasoning and tool calls."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxserve.tokenizer import Tokenizer, _byte_chars

MARKED = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def marked_tokenizer(
    config: dict | None = None,
    *,
    template: str | None = None,
    special: bool | None = False,
) -> Tokenizer:
    """A token per byte, ChatML's special tokens, and `MARKED`.

    Args:
        config: tokenizer_config.json.
        template: the chat template.
        special: whether `MARKED` are special; None for a tokenizer without them.
    """
    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if special is not None:
        backend.add_tokens([AddedToken(text, special=special) for text in MARKED])
    return Tokenizer(backend, {"eos_token": "<|im_end|>", **(config or {})}, template)

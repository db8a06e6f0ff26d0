"""A GGUF file's vocabulary as a Hugging Face tokenizer.json and tokenizer_config.json.

Knows llama.cpp's token types and how each family splits text before merging.  Runs no merge: the
`tokenizers` library does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxserve.files import write_json

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS}|{_TAIL}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)


@dataclass(frozen=True)
class _Split:
    """How a byte-level vocabulary cuts text before it merges."""

    regex: str | None = None
    """Isolated matches; None is GPT-2's own split."""
    single_digits: bool = False
    """Cut before and after every digit first."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken as it is."""
    adds_bos: bool = False
    """Whether BOS is added where the file does not say."""


_SPLITS = {
    "gpt-2": _Split(),
    **dict.fromkeys(
        ("smollm", "codeshell", "exaone", "minerva", "starcoder", "refact", "command-r"),
        _Split(single_digits=True),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3"),
        _Split(_LLAMA3, ignore_merges=True, adds_bos=True),
    ),
    "smaug-bpe": _Split(_LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _Split(_QWEN2)),
    "tekken": _Split(_TEKKEN, ignore_merges=True, adds_bos=True),
}
"""`tokenizer.ggml.pre` -> split.  A wrong guess would give wrong ids, so others are refused."""


def write_tokenizer(value: Callable[[str], Any], directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        value: the metadata value of a key, or None.
        directory: exists.

    Raises:
        ValueError: no vocabulary, or a tokenizer model or pre-tokenizer that is not supported.
    """

    def ggml(key: str) -> Any:
        return value(f"tokenizer.ggml.{key}")

    tokens = ggml("tokens")
    if not tokens:
        raise ValueError("the GGUF file has no vocabulary; give a tokenizer with --tokenizer")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(ggml("model"))
    if build is None:
        raise ValueError(
            f"GGUF tokenizer model {ggml('model')!r} is not supported; supported are gpt2, llama"
        )
    backend, adds_bos = build(ggml)
    if ggml("add_bos_token") is not None:
        adds_bos = bool(ggml("add_bos_token"))
    _add_special_tokens(backend, tokens, ggml("token_type") or ())

    named = {
        name: tokens[ggml(key)]
        for name, key in (
            ("bos_token", "bos_token_id"),
            ("eos_token", "eos_token_id"),
            ("unk_token", "unknown_token_id"),
            ("pad_token", "padding_token_id"),
        )
        if ggml(key) is not None
    }
    adds_bos = adds_bos and "bos_token" in named
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{named['bos_token']} $A",
            special_tokens=[(named["bos_token"], ggml("bos_token_id"))],
        )
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "clean_up_tokenization_spaces": False,
        **named,
    }
    if value("tokenizer.chat_template") is not None:
        config["chat_template"] = value("tokenizer.chat_template")
    write_json(directory / "tokenizer_config.json", config)


def _byte_level(ggml: Callable[[str], Any]) -> tuple[Tokenizer, bool]:
    """Byte-pair encoding over bytes, split first by the family's regular expression."""
    split = _SPLITS.get(ggml("pre"))
    if split is None:
        raise ValueError(
            f"GGUF pre-tokenizer {ggml('pre')!r} is not known; give the model's own tokenizer "
            f"with --tokenizer, or a file with one of {', '.join(sorted(_SPLITS))}"
        )
    backend = Tokenizer(
        models.BPE(
            vocab=_vocabulary(ggml("tokens")),
            merges=[_pair(merge) for merge in ggml("merges") or ()],
            ignore_merges=split.ignore_merges,
        )
    )
    steps: list[Any] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece(ggml: Callable[[str], Any]) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE with byte fallback; spaces are U+2581 and one is put in front."""
    tokens, unknown = ggml("tokens"), ggml("unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocab=_vocabulary(tokens),
            merges=_merges_by_score(tokens, ggml("scores") or [0.0] * len(tokens)),
            unk_token=tokens[unknown if unknown is not None else 0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = ggml("add_space_prefix") is not False
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, the best-scored result first."""
    score_of = dict(zip(tokens, scores, strict=True))
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for token, score in score_of.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in score_of and right in score_of:
                ranked.append((-score, len(ranked), (left, right)))
    return [pair for _, _, pair in sorted(ranked)]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(token, i)
    return vocabulary


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_special_tokens(backend: Tokenizer, tokens: list[str], types: Any) -> None:
    """Control tokens are special; user-defined ones are matched whole but are ordinary text."""
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])

"""Text to token ids and back, as the model's own tokenizer files say.

Knows BOS rules and special tokens.  Rendering a chat is `jaxserve.chat`'s; streaming text out is
`jaxserve.detokenizer`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from jaxserve.files import read_json_if_there
from jaxserve.special_text import SpecialTextGuard


class Tokenizer:
    """A `tokenizers` tokenizer with the settings Hugging Face keeps beside it.

    Args:
        backend: the tokenizer proper.
        config: contents of tokenizer_config.json.
        chat_template: Jinja text; None takes the config's.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        config = config or {}
        self.backend = backend
        self.special_tokens = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(config.get(name))) is not None
        }
        """Role (e.g. "bos_token") -> its text, for chat templates."""
        self.bos_token_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        """The tokenizer's end token; a model's configuration may name more."""
        templates = _templates(config.get("chat_template"))
        self.chat_template = templates.get("default") if chat_template is None else chat_template
        """Jinja text, or None for a model without one."""
        template = config.get("response_template")
        self.response_template: Mapping[str, Any] | None = (
            template if isinstance(template, Mapping) else None
        )
        """How the model writes reasoning and tool calls, as transformers describes it, or None."""
        self.special_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        """Control tokens, which decoding leaves out by default."""
        self.adds_bos = self._adds_bos(config.get("add_bos_token"))
        """Whether BOS is put before plain text."""
        self._texts: dict[int, str] = {}

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """`from_directory` or `from_file`, by what the path is.

        Raises:
            ValueError: there is no tokenizer, or its files are damaged.
        """
        if path.is_file():
            return cls.from_file(path, chat_template)
        return cls.from_directory(path, chat_template)

    @classmethod
    def from_directory(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Read tokenizer.json of a directory, and the files beside it that there are.

        Raises:
            ValueError: tokenizer.json is missing or a file is damaged.
        """
        if not (path / "tokenizer.json").is_file():
            raise ValueError(
                f"{path} has no tokenizer.json; give a directory that has one with --tokenizer"
            )
        return cls.from_file(path / "tokenizer.json", chat_template)

    @classmethod
    def from_file(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Read a tokenizer.json, and the files beside it that there are.

        Raises:
            ValueError: a file is damaged.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} is not a readable tokenizer.json ({error})") from error
        special = read_json_if_there(path.parent / "special_tokens_map.json") or {}
        config = read_json_if_there(path.parent / "tokenizer_config.json") or {}
        template_file = path.parent / "chat_template.jinja"
        if chat_template is None and template_file.is_file():
            chat_template = template_file.read_text(encoding="utf-8")
        return cls(backend, {**special, **config}, chat_template)

    @classmethod
    def of_bytes(cls, chat_template: str | None = None) -> Tokenizer:
        """One token per byte, ids 0 to 255, for models that come without a tokenizer."""
        from tokenizers import decoders, models, pre_tokenizers

        vocabulary = {char: byte for byte, char in enumerate(_byte_chars())}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        return cls(backend, None, chat_template)

    @property
    def vocab_size(self) -> int:
        """Number of tokens; a model's embedding may have more rows."""
        return int(self.backend.get_vocab_size())

    def encode(self, text: str, *, with_bos: bool = True) -> list[int]:
        """Token ids of plain text.

        BOS is put in front if the tokenizer's own settings say so, the text does not begin with
        it already and it is wanted; nothing is ever appended.  The text of special tokens is read
        as these tokens, unlike in the content of chat messages.
        """
        # Only a batch is encoded without holding the interpreter, which matters for long texts.
        (encoded,) = self.backend.encode_batch([text], add_special_tokens=False)
        return self._with_bos(encoded.ids) if with_bos else list(encoded.ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, rendered with the chat template.

        The template's special tokens become control tokens; the same text inside what the caller
        gives (content, names, tools) stays plain text.  There is one BOS if the template writes
        it or the tokenizer adds it, never two.

        Args:
            messages: each with "role" and "content": a string, or a list of text parts, which
                are joined with nothing between.
            tools: JSON schemas of functions the template may describe.
            add_generation_prompt: end with the opening of the assistant's turn.
            variables: further ones of the template.

        Raises:
            ValueError: no template; no messages; a message or part that is not text; or the
                template refuses the conversation, with its reason.
        """
        from jaxserve.chat import check_messages, render

        mark = self._guard.mark
        rendered = render(
            self.chat_template,
            mark(check_messages(messages)),
            tools=mark(tools),
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **mark(dict(variables or {}))},
        )
        return self._with_bos(self._guard.encode(rendered))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids.  Ids outside the vocabulary have none."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; bytes that are no whole character become U+FFFD."""
        if token_id not in self._texts:
            self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return self._texts[token_id]

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token: those of a text are the concatenation of its tokens'.

        The exception is SentencePiece, which drops the space in front of a text.
        """
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added_ids:
            return str(piece).encode()
        if self._is_byte_level:
            return bytes(_BYTE_OF[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("▁", " ").encode()

    @cached_property
    def _guard(self) -> SpecialTextGuard:
        return SpecialTextGuard(self.backend)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self.backend.decoder
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def _id_of(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        found = None if text is None else self.backend.token_to_id(text)
        return None if found is None else int(found)

    def _adds_bos(self, configured: Any) -> bool:
        if self.bos_token_id is None:
            return False
        if isinstance(configured, bool):
            return configured
        return bool(self.backend.encode("a").ids[:1] == [self.bos_token_id])

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.adds_bos or ids[:1] == [self.bos_token_id]:
            return ids
        assert self.bos_token_id is not None
        return [self.bos_token_id, *ids]


def _token_text(token: Any) -> str | None:
    """A special token is spelled as a string or as a mapping with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _templates(value: Any) -> dict[str, str]:
    """A chat template is one string, or a list of named ones."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {}


def _byte_chars() -> list[str]:
    """GPT-2's printable character for each byte: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTE_OF = {char: byte for byte, char in enumerate(_byte_chars())}

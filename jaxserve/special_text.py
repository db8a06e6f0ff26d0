"""Keeps the text of special tokens in what a user wrote from becoming control tokens.

A chat template mixes its own special tokens with the users' words in one string.  A character
that no text has, put inside every such place of the users' words, survives the rendering and
tells the two apart.  Does not know chats or templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

_BREAK, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
"""Noncharacters: no text may be interchanged with them, so users lose nothing."""


class SpecialTextGuard:
    """Breaks special-token text in user strings, and encodes a rendering that has the breaks.

    Args:
        backend: the tokenizer; tokens it calls special are guarded, but for those of a single
            character, which cannot be broken.
    """

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._id_of = {
            token.content: i
            for i, token in backend.get_added_tokens_decoder().items()
            if token.special and len(token.content) > 1
        }
        longest_first = sorted(self._id_of, key=len, reverse=True)
        anything = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._special = re.compile(anything)
        self._first_char = re.compile(f"(?={anything}).", re.DOTALL)
        self._beginnings = {text[:n] for text in self._id_of for n in range(1, len(text))}

    def mark(self, value: Any) -> Any:
        """Return the value with a break in all special-token text of its strings.

        Mappings and lists are walked.  Keys are marked, too: JSON of the caller's, such as a
        function's schema, is rendered with them.

        Raises:
            ValueError: a string holds the characters that serve as breaks, or the value is nested
                too deeply.
        """
        try:
            return self._mark(value)
        except RecursionError:
            raise ValueError("a message or tool is nested too deeply to be rendered") from None

    def _mark(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, Mapping):
            return {self._mark_key(key): self._mark(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(item) for item in value]
        return value

    def _mark_key(self, key: Any) -> Any:
        if not isinstance(key, str):
            return key
        # A name that a template looks up must stay as it is; such names begin no special token.
        return self._broken(key) if key.isidentifier() else self._mark_text(key)

    def _broken(self, text: str) -> str:
        if re.search(f"[{_BREAK}-{_CLOSE}]", text):
            raise ValueError(
                "a message holds one of the noncharacters U+FDD0 to U+FDD2, which are reserved; "
                "remove it"
            )
        return self._first_char.sub(f"\\g<0>{_BREAK}", text)

    def _mark_text(self, text: str) -> str:
        text = self._broken(text)
        # The template may go on with another string of the user's, which must not complete it.
        end = len(text.rstrip())
        if any(text[max(0, end - n) : end] in self._beginnings for n in range(1, self._longest)):
            text = text[:end] + _BREAK + text[end:]
        return text

    def encode(self, rendered: str) -> list[int]:
        """Token ids: broken special-token text as plain text, the rest as what it is."""
        if _BREAK not in rendered:
            return list(self._backend.encode(rendered, add_special_tokens=False).ids)
        aliased = self._special.sub(lambda match: self._alias(match[0]), rendered)
        twin_text = aliased.replace(_BREAK, "")
        return list(self._twin.encode(twin_text, add_special_tokens=False).ids)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._id_of), default=0)

    def _alias(self, text: str) -> str:
        return _name(self._id_of[text]) if text in self._id_of else text

    @cached_property
    def _twin(self) -> Tokenizer:
        """The same tokenizer, with each special token under a name that users cannot write."""
        return Tokenizer.from_str(_renamed(self._backend, self._alias))


def with_unwritable_names(backend: Tokenizer) -> str:
    """The JSON of a tokenizer, with each added token under a name that no text has.

    To it the text of such a token is plain text.  Ids are the same.
    """
    ids = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    return _renamed(backend, lambda text: _name(ids[text]) if text in ids else text)


def _name(token_id: int) -> str:
    return f"{_OPEN}{token_id}{_CLOSE}"


def _renamed(backend: Tokenizer, alias: Callable[[str], str]) -> str:
    data = json.loads(backend.to_str())
    data["post_processor"] = None
    for token in data["added_tokens"]:
        token["content"] = alias(token["content"])
    model = data["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {alias(text): i for text, i in model["vocab"].items()}
    elif isinstance(model.get("vocab"), list):
        model["vocab"] = [[alias(text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = alias(model["unk_token"])
    return json.dumps(data)

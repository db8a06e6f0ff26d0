"""The tokens that a tokenizer never builds from others, such as `<tool_call>`.

Knows how a grammar has to write them.  Does not know what they mean to a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Marks:
    """Added tokens of a tokenizer."""

    ids: Mapping[str, int]
    """By their texts."""
    special: frozenset[str] = frozenset()
    """Those that decoding leaves out by default."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Marks:
        """The added tokens of a tokenizer."""
        added = tokenizer.backend.get_added_tokens_decoder().items()
        return cls(
            {token.content: token_id for token_id, token in added},
            frozenset(token.content for _, token in added if token.special),
        )

    def are_in(self, text: str) -> bool:
        """Whether any of them is."""
        return any(mark in text for mark in self.ids)

    def lark(self, text: str) -> str:
        """A text in Lark's notation, the tokens in it by their ids.

        To llguidance such a token is no text: the letters of its name do not match it.
        """
        pieces = [text]
        if self.ids:
            longest_first = sorted(self.ids, key=len, reverse=True)
            pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        written = [
            f"<[{self.ids[piece]}]>" if piece in self.ids else json.dumps(piece)
            for piece in pieces
            if piece
        ]
        return " ".join(written) or '""'

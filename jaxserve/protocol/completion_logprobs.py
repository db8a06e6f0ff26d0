"""Log-probabilities in the form of `/v1/completions`: parallel lists over the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from jaxserve.outputs import Logprob

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry per token in each list.  The first token of an echoed prompt has no value.

    `text_offset` counts characters of the token texts; a character spread over several tokens
    shows as U+FFFD in each of them.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    @property
    def end_offset(self) -> int:
        """Where the next token's text begins."""
        return self.text_offset[-1] + len(self.tokens[-1]) if self.tokens else 0


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[dict[int, Logprob] | None],
    tokenizer: Tokenizer,
    offset: int = 0,
) -> CompletionLogprobs:
    """The lists for tokens and their candidates; the first token's text begins at `offset`."""
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token_id, position in zip(token_ids, positions, strict=True):
        token = (
            tokenizer.token_text(token_id) if position is None else position[token_id].decoded_token
        )
        result.tokens.append(token)
        result.token_logprobs.append(None if position is None else position[token_id].logprob)
        result.top_logprobs.append(None if position is None else _by_text(position))
        result.text_offset.append(offset)
        offset += len(token)
    return result


def _by_text(position: dict[int, Logprob]) -> dict[str, float]:
    """Token text to log-probability; of tokens with one text the most likely stays."""
    entries = sorted(position.values(), key=lambda entry: entry.rank, reverse=True)
    return {entry.decoded_token: entry.logprob for entry in entries}

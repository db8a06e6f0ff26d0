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


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[dict[int, Logprob] | None],
    tokenizer: Tokenizer,
    offset: int = 0,
    *,
    named_by_id: bool = False,
) -> CompletionLogprobs:
    """The lists for tokens and their candidates.

    Args:
        token_ids: of the text, in order.
        positions: their candidates; None for the first token of a prompt.
        tokenizer: for the texts of tokens without candidates.
        offset: where the first token's text begins.
        named_by_id: tokens are called "token_id:5", which no two share, and not by their texts.
    """
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token_id, position in zip(token_ids, positions, strict=True):
        text = (
            tokenizer.token_text(token_id) if position is None else position[token_id].decoded_token
        )
        result.tokens.append(name_by_id(token_id) if named_by_id else text)
        result.token_logprobs.append(None if position is None else position[token_id].logprob)
        result.top_logprobs.append(None if position is None else _named(position, named_by_id))
        result.text_offset.append(offset)
        offset += len(text)
    return result


def name_by_id(token_id: int) -> str:
    """What vLLM calls a token whose text is not its name."""
    return f"token_id:{token_id}"


def _named(position: dict[int, Logprob], named_by_id: bool) -> dict[str, float]:
    """Token name to log-probability; of tokens with one text the most likely stays."""
    entries = sorted(position.items(), key=lambda item: item[1].rank, reverse=True)
    return {
        name_by_id(token_id) if named_by_id else entry.decoded_token: entry.logprob
        for token_id, entry in entries
    }

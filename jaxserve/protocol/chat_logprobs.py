"""Log-probabilities in the form of `/v1/chat/completions`: an object per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from jaxserve.outputs import Logprob
from jaxserve.protocol.chat_request import ChatCompletionRequest
from jaxserve.protocol.completion_logprobs import name_by_id

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer


class TopLogprob(msgspec.Struct, kw_only=True):
    """One candidate of a position.

    `bytes` are those of the token's text, whole characters or not: joined over tokens they are
    the text, where `token` shows U+FFFD for a part of a character.
    """

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    """The sampled token of a position, with the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """One entry per generated token."""

    content: list[TokenLogprob]
    refusal: None = None


def chat_logprobs(
    request: ChatCompletionRequest,
    token_ids: Sequence[int],
    positions: Sequence[dict[int, Logprob]],
    tokenizer: Tokenizer,
) -> ChatLogprobs:
    """The entries of tokens, each with as many likely candidates as the request wants."""
    content = []
    num_top = request.top_logprobs or 0

    def entry(token_id: int, candidate: Logprob) -> dict[str, Any]:
        by_id = request.return_tokens_as_token_ids
        return {
            "token": name_by_id(token_id) if by_id else candidate.decoded_token,
            "logprob": candidate.logprob,
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    for token_id, position in zip(token_ids, positions, strict=True):
        # The sampled token is always in `position`, and last where it is not one of the top.
        by_rank = sorted(position.items(), key=lambda item: item[1].rank)[:num_top]
        content.append(
            TokenLogprob(
                **entry(token_id, position[token_id]),
                top_logprobs=[TopLogprob(**entry(*item)) for item in by_rank],
            )
        )
    return ChatLogprobs(content=content)

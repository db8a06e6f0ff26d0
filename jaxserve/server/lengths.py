"""Prompts that cannot fit, found before time is spent on them.

Knows that a token covers a bounded number of characters, so that a text far beyond the context
need not be encoded to be refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from jaxserve.protocol import ChatCompletionRequest, CompletionRequest, Prompt, RequestError
from jaxserve.tokenizer import Tokenizer

Asked = CompletionRequest | ChatCompletionRequest


def check_texts(asked: Asked, tokenizer: Tokenizer, max_model_len: int) -> int:
    """The number of characters of the request's texts.

    Raises:
        RequestError: a text is too long whatever its tokens are.
    """
    lengths = _text_lengths(asked)
    least_tokens = -(-max(lengths, default=0) // _longest_token(tokenizer))
    if least_tokens > max_model_len:
        raise _too_long(asked, f"at least {least_tokens}", max_model_len)
    return sum(lengths)


def check_prompts(
    asked: Asked, prompts: Sequence[Prompt], max_model_len: int, max_tokens: int | None
) -> None:
    """Check that every prompt leaves room for an output token, if there is to be one.

    Raises:
        RequestError: one does not.
    """
    room = 0 if max_tokens == 0 else 1
    for prompt in prompts:
        if len(prompt.token_ids) + room > max_model_len:
            raise _too_long(asked, str(len(prompt.token_ids)), max_model_len)


def _too_long(asked: Asked, num_tokens: str, max_model_len: int) -> RequestError:
    return RequestError(
        f"this model's maximum context length is {max_model_len} tokens, prompt and output "
        f"together, but the prompt has {num_tokens}; shorten it",
        "messages" if isinstance(asked, ChatCompletionRequest) else "prompt",
        "context_length_exceeded",
    )


def _text_lengths(asked: Asked) -> list[int]:
    """Characters of each prompt that is a text."""
    if isinstance(asked, ChatCompletionRequest):
        return [sum(map(_content_length, asked.messages))]
    items = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
    return [len(item) for item in items if isinstance(item, str)]


def _content_length(message: Any) -> int:
    content = message.content or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part.text or "") for part in content)


@functools.lru_cache(maxsize=4)
def _longest_token(tokenizer: Tokenizer) -> int:
    """Characters of the longest token; of byte-level ones bytes, which are no fewer."""
    return max(map(len, tokenizer.backend.get_vocab()))

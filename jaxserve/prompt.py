"""The forms in which a caller may give a prompt.

Knows what turns each into token ids.  Conversations are the chat template's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any] | Sequence[int]
"""Text, `{"prompt": text}`, `{"prompt_token_ids": ids}` or the ids themselves."""


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """The text of a prompt, if it has one, and its token ids.

    Raises:
        ValueError: a mapping with neither text nor ids.
    """
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), list(prompt["prompt_token_ids"])
        if isinstance(prompt.get("prompt"), str):
            return prompt["prompt"], tokenizer.encode(prompt["prompt"])
        raise ValueError(
            f"prompt {dict(prompt)!r} has neither 'prompt' (text) nor 'prompt_token_ids'"
        )
    return None, list(prompt)

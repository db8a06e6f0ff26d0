"""The body of `/v1/completions`: its JSON types, and what they ask of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.protocol.constraints import constraint
from jaxserve.protocol.errors import RequestError
from jaxserve.protocol.shared import Prompt, SharedFields
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that brings none, as OpenAI documents; a chat has no limit."""


class CompletionRequest(SharedFields, kw_only=True):
    """Body of `/v1/completions`."""

    # One string, a list of strings, one list of token ids, or a list of those; JSON lists are one
    # type to msgspec, so `prompts` tells the forms apart.
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    # False: a text prompt gets no beginning-of-sequence token.
    add_special_tokens: bool | None = None

    def sampling_params(
        self, answer_format: object = None, prompts: Sequence[Prompt] = ()
    ) -> SamplingParams:
        """What the request asks of the sampler.

        Args:
            answer_format, prompts: make no difference; a chat request needs them.

        Raises:
            RequestError: a value out of range, or a field that is not supported.
        """
        self._refuse(suffix="nothing can be inserted between two texts")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of={self.best_of} other than n={self.n or 1} is not supported; leave it out",
                "best_of",
            )
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens=0 generates nothing; it is allowed only with echo", "max_tokens"
            )
        prompt_logprobs = self.logprobs if self.echo else None
        if max_tokens == 0 and prompt_logprobs is None:
            prompt_logprobs = 0
        return self._params(
            max_tokens=max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=constraint(self.response_format, self.structured_outputs),
        )

    def prompts(self, tokenizer: Tokenizer) -> list[Prompt]:
        """Encode the prompt or prompts.  Special tokens written in a text are parsed as such.

        Raises:
            RequestError: no prompt, an empty one, or a list of mixed kinds.
        """
        return [self._prompt(item, tokenizer) for item in _prompt_items(self.prompt)]

    def _prompt(self, item: str | list[int], tokenizer: Tokenizer) -> Prompt:
        text = item if isinstance(item, str) else None
        wants_bos = self.add_special_tokens is not False
        token_ids = tokenizer.encode(item, with_bos=wants_bos) if isinstance(item, str) else item
        if not token_ids:
            raise RequestError("prompt is empty: it has no token to continue from", "prompt")
        if text is None and self.echo:
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
        return Prompt(token_ids, text)


def _prompt_items(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a request, each a text or a list of token ids."""
    items = [prompt] if isinstance(prompt, str) else prompt
    texts = [item for item in items if isinstance(item, str)]
    token_ids = [item for item in items if isinstance(item, int)]
    lists = [item for item in items if isinstance(item, list)]
    if not items:
        raise RequestError("prompt=[] has no prompt", "prompt")
    if len(items) not in (len(texts), len(token_ids), len(lists)):
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of "
            "token ids, not a mixture",
            "prompt",
        )
    return [token_ids] if token_ids else [*texts, *lists]

"""Request fields that both endpoints have."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.protocol.constraints import ResponseFormat, StructuredOutputs
from jaxserve.protocol.errors import RequestError, request_error
from jaxserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, as the engine wants it."""

    token_ids: list[int]
    text: str | None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of a streamed request."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(msgspec.Struct, kw_only=True):
    """Fields that both endpoints share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    logit_bias: dict[str, float] | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    # Whose the request is, for the fair share.
    user: str | None = None
    request_id: str | None = None
    # Seconds after which the answer ends where it is.
    timeout: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # Ids beside the texts, which not every token has of its own.
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    bad_words: Any = None
    cache_salt: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    prompt_logprobs: int | None = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    detokenize: bool | None = None

    def blame(self, error: ValueError) -> RequestError:
        """The engine's complaint as one about the field of this request that is its cause.

        What constrains an answer is one thing to the engine, and several fields here.
        """
        blamed = request_error(error)
        field = self._field_of(blamed.param)
        if field is None or field == blamed.param:
            return blamed
        message = re.sub(rf"^{blamed.param}(\.\w+)?", field, str(error))
        return RequestError(message, field, blamed.code, blamed.status)

    def _field_of(self, param: str | None) -> str | None:
        """The field of this request that gave the engine a parameter."""
        if param == "structured_outputs" and not self.structured_outputs:
            return "response_format"
        return param

    def _refuse(self, **remedies: str) -> None:
        """Refuse fields that would change the answer, unless their value is empty or false.

        Raises:
            RequestError: one of them has another value.
        """
        for name, remedy in (_REFUSED | remedies).items():
            if getattr(self, name):
                raise RequestError(f"{name} is not supported; {remedy}", name)
        if self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is not supported; use echo and logprobs of /v1/completions",
                "prompt_logprobs",
            )
        if self.detokenize is False:
            raise RequestError(f"detokenize=false is not supported; {LEAVE_OUT}", "detokenize")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise RequestError(f"timeout={self.timeout} must be above 0 seconds", "timeout")

    def _params(self, **fields: Any) -> SamplingParams:
        """Build the parameters from the shared fields and the endpoint's own."""
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                fields.setdefault(name, value)
        try:
            return SamplingParams(**fields)
        except ValueError as error:
            raise self.blame(error) from error


LEAVE_OUT = "leave it out"
_REFUSED = {
    "bad_words": LEAVE_OUT,
    "cache_salt": LEAVE_OUT,
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_json": "use structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "kv_transfer_params": LEAVE_OUT,
    "logits_processors": LEAVE_OUT,
    "thinking_token_budget": LEAVE_OUT,
    "truncate_prompt_tokens": "send a shorter prompt",
    "use_beam_search": LEAVE_OUT,
}
_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "skip_special_tokens",
    "include_stop_str_in_output",
)

"""What a caller may ask of one request's sampling; vLLM's field names.

Validation lives here, so that nothing out of range reaches the engine.  Limits that depend on
the model (vocabulary size, context length) are checked by `check_against`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.structured import StructuredOutputsParams

MAX_LOGIT_BIAS = 300
"""Most entries of `logit_bias`: OpenAI's documented limit, and the size of the device array."""
MAX_STOP_IDS = 64
"""Most end tokens (stop ids and end-of-sequence ids) that `min_tokens` can hold back."""
MAX_REPETITION_PENALTY = 1e3
"""Beyond this, or below its inverse, penalised logits could leave the range of float32."""
SMALLEST_TEMPERATURE = 1e-30
"""Below this a temperature is zero: dividing by it would leave the range of float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and reporting options of one request.

    `temperature=0` is greedy (lowest id on ties).  `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are
    "off".  `top_p=0` keeps the most likely token only.  Presence and frequency penalties count
    generated tokens; the repetition penalty counts the prompt too.  `seed` makes a request
    reproducible whatever else runs: the random bits of a token are a function of the seed, the
    sample's index and the token's position alone.

    `max_tokens=None` generates up to the context limit; a larger value than fits is cut there,
    with finish reason "length".  `min_tokens` holds back every end token, and stop strings are
    not looked for before it.  `logprobs=k` reports the sampled token and the k most likely, from
    the model's own distribution before penalties, bias and temperature.  `structured_outputs`
    constrains the text; end tokens are then possible where it is complete, and only there.

    Raises:
        ValueError: a value of the wrong type or out of range; the message names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _number(self, "temperature", 0, 2e3)
        _number(self, "top_p", 0, 1)
        _number(self, "min_p", 0, 1)
        _number(self, "presence_penalty", -2, 2)
        _number(self, "frequency_penalty", -2, 2)
        _number(self, "repetition_penalty", 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _integer(self, "n", 1, 1024)
        _integer(self, "top_k", -1, 2**31 - 1)
        _integer(self, "min_tokens", 0, 2**31 - 1)
        for name, least in (("max_tokens", 0), ("logprobs", 0), ("prompt_logprobs", 0)):
            if getattr(self, name) is not None:
                _integer(self, name, least, 2**31 - 1)
        if self.seed is not None:
            _integer(self, "seed", -(2**63), 2**64 - 1)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs text; leave out detokenize=False")
        object.__setattr__(self, "stop_token_ids", _ids(self, "stop_token_ids") or ())
        object.__setattr__(self, "allowed_token_ids", _ids(self, "allowed_token_ids"))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids=[] allows no token; leave it out to allow all")
        object.__setattr__(self, "structured_outputs", _structured(self.structured_outputs))
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            raise ValueError(
                "structured_outputs beside allowed_token_ids may leave no token at all; say it in "
                "the constraint alone"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}"
            )
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise ValueError(
                "max_tokens=0 generates nothing; it is allowed only with prompt_logprobs"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, normalised."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < SMALLEST_TEMPERATURE or self.top_k == 1 or self.top_p == 0

    def check_against(self, vocab_size: int, max_logprobs: int, end_ids: frozenset[int]) -> None:
        """Check what depends on the model and the engine.

        Args:
            vocab_size: token ids are below this.
            max_logprobs: the engine's limit for `logprobs` and `prompt_logprobs`.
            end_ids: every token that can end this request.

        Raises:
            ValueError: naming the field, the value and the bound.
        """
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > max_logprobs:
                raise ValueError(
                    f"{name}={value} is above this engine's max_logprobs={max_logprobs}; ask for "
                    "fewer or start the engine with a larger limit"
                )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if not 0 <= token < vocab_size:
                    raise ValueError(
                        f"{name} has token id {token}, outside the vocabulary of {vocab_size}"
                    )
        if self.min_tokens > 0:
            if len(end_ids) > MAX_STOP_IDS:
                raise ValueError(
                    f"min_tokens with {len(end_ids)} end tokens; at most {MAX_STOP_IDS} are "
                    "supported, so give fewer stop_token_ids"
                )
            if self.allowed_token_ids is not None and set(self.allowed_token_ids) <= end_ids:
                raise ValueError(
                    f"min_tokens={self.min_tokens} holds back every one of allowed_token_ids="
                    f"{list(self.allowed_token_ids)}; allow a token that does not end the text"
                )


_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize")


def _number(params: SamplingParams, name: str, low: float, high: float) -> None:
    value: Any = getattr(params, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name}={value!r} must be a finite number")
    if not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be in [{low}, {high}]")


def _integer(params: SamplingParams, name: str, low: int, high: int) -> None:
    value: Any = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an integer")
    if not low <= value <= high:
        raise ValueError(f"{name}={value!r} must be in [{low}, {high}]")


def _structured(value: Any) -> StructuredOutputsParams | None:
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"structured_outputs={value!r} must be a mapping")
    unknown = sorted(map(str, value.keys() - StructuredOutputsParams.__dataclass_fields__.keys()))
    if unknown:
        raise ValueError(f"structured_outputs has {unknown[0]!r}, which is not supported")
    return StructuredOutputsParams(**value)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or ()
    if not isinstance(strings, (list, tuple)) or any(not isinstance(s, str) for s in strings):
        raise ValueError(f"stop={stop!r} must be a string or a list of strings")
    if "" in strings:
        raise ValueError("stop has an empty string, which would match everywhere; remove it")
    return tuple(strings)


def _ids(params: SamplingParams, name: str) -> tuple[int, ...] | None:
    value: Any = getattr(params, name)
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or any(
        isinstance(v, bool) or not isinstance(v, int) for v in value
    ):
        raise ValueError(f"{name}={value!r} must be a list of token ids")
    return tuple(value)


def _bias(bias: Any) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias={bias!r} must map token ids to numbers")
    if len(bias) > MAX_LOGIT_BIAS:
        raise ValueError(f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} fit")
    result = {}
    for token, value in bias.items():
        try:
            if isinstance(token, (bool, float)):
                raise TypeError
            token_id = int(token)
        except (TypeError, ValueError):
            raise ValueError(f"logit_bias has key {token!r}, which is not a token id") from None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise ValueError(f"logit_bias[{token!r}]={value!r} must be a number")
        if not -100 <= value <= 100:
            raise ValueError(f"logit_bias[{token!r}]={value!r} must be in [-100, 100]")
        result[token_id] = float(value)
    return result

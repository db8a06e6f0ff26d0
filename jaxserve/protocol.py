"""OpenAI request bodies: their JSON types, and what they ask of the engine.

Knows names, types and defaults of `/v1/completions` and `/v1/chat/completions`, with vLLM's names
for what OpenAI lacks.  Does not know HTTP, batch files, the engine, or responses
(`protocol_response.py`).

Unknown fields are ignored, as clients send many that change no answer (`metadata`, `store`...).
Known fields that would change the answer and are not supported are refused.  A JSON null is the
same as an absent field.  `user` says whose the request is, for the fair share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that brings none, as OpenAI documents; a chat has no limit."""


class RequestError(ValueError):
    """A request that cannot be served as it stands.

    Attributes:
        param: the field at fault, if one is.
        code: OpenAI's short name of the error.
        status: the HTTP status that says the same.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, as the engine wants it."""

    token_ids: list[int]
    text: str | None


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options` of a streamed request."""

    include_usage: bool | None = None


class _Request(msgspec.Struct, kw_only=True):
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
    user: str | None = None

    def _params(self, **fields: Any) -> SamplingParams:
        """Build the parameters from the shared fields and the endpoint's own."""
        for name in _SAMPLING_FIELDS:
            value = getattr(self, name)
            if value is not None:
                fields.setdefault(name, value)
        try:
            return SamplingParams(**fields)
        except ValueError as error:
            raise request_error(error) from error


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


class CompletionRequest(_Request, kw_only=True):
    """Body of `/v1/completions`."""

    # One string, a list of strings, one list of token ids, or a list of those; JSON lists are one
    # type to msgspec, so `prompts` tells the forms apart.
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None

    def sampling_params(self) -> SamplingParams:
        """What the request asks of the sampler.

        Raises:
            RequestError: a value out of range, or a field that is not supported.
        """
        if self.suffix:
            raise RequestError("suffix: insertion is not supported; leave it out", "suffix")
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
            max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs
        )

    def prompts(self, tokenizer: Tokenizer) -> list[Prompt]:
        """Encode the prompt or prompts.  Special tokens written in a text are parsed as such.

        Raises:
            RequestError: no prompt, an empty one, or a list of mixed kinds.
        """
        return [self._prompt(item, tokenizer) for item in _prompt_items(self.prompt)]

    def _prompt(self, item: str | list[int], tokenizer: Tokenizer) -> Prompt:
        text = item if isinstance(item, str) else None
        token_ids = tokenizer.encode(item) if isinstance(item, str) else item
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


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One message of a conversation.  A list of text parts means their concatenation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it: text content, and "developer" is "system"."""
        fields = {name: getattr(self, name) for name in ("name", "tool_calls", "tool_call_id")}
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self._text()}
        return message | {name: value for name, value in fields.items() if value is not None}

    def _text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.tool_calls:
                return ""
            raise RequestError(f"messages: the {self.role} message has no content", "messages")
        if not self.content:
            raise RequestError(
                f"messages: the content of the {self.role} message is an empty list", "messages"
            )
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"messages: a content part of type {part.type!r}; only parts of type 'text' "
                    "with a 'text' are supported",
                    "messages",
                )
        return "".join(part.text for part in self.content if part.text is not None)


class ChatCompletionRequest(_Request, kw_only=True):
    """Body of `/v1/chat/completions`.  `max_completion_tokens` wins over `max_tokens`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling_params(self) -> SamplingParams:
        """What the request asks of the sampler.

        Raises:
            RequestError: a value out of range, or a field that is not supported.
        """
        self._refuse_unsupported()
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        return self._params(
            max_tokens=self.max_tokens
            if self.max_completion_tokens is None
            else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def prompts(self, tokenizer: Tokenizer) -> list[Prompt]:
        """Render and encode the conversation.  Special tokens in a message are plain text.

        Raises:
            RequestError: no messages, or content that is not text.
            ValueError: the model has no chat template, or it refuses the messages.
        """
        if not self.messages:
            raise RequestError("messages=[] has nothing to answer", "messages")
        kwargs = self.chat_template_kwargs or {}
        reserved = sorted({"messages", "tools", "add_generation_prompt"} & kwargs.keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs has {reserved[0]!r}, which is a field of its own",
                "chat_template_kwargs",
            )
        token_ids = tokenizer.encode_chat(
            [message.for_template() for message in self.messages],
            tools=None if self.tool_choice == "none" else self.tools,
            add_generation_prompt=self.add_generation_prompt is not False,
            **kwargs,
        )
        return [Prompt(token_ids, None)]

    def _refuse_unsupported(self) -> None:
        for name in ("functions", "function_call", "audio", "web_search_options"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not supported; leave it out", name)
        if self.modalities not in (None, ["text"]):
            raise RequestError(f"modalities={self.modalities!r}: only text is made", "modalities")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise RequestError(
                f"response_format={self.response_format!r}: only type 'text' is supported",
                "response_format",
            )
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                f"tool_choice={self.tool_choice!r}: only 'none' and 'auto' are supported",
                "tool_choice",
            )


Body = TypeVar("Body", bound=_Request)


def convert_body(body: Any, kind: type[Body]) -> Body:
    """Check a decoded JSON value against a request type, strictly: 1.0 and "1" are no integers.

    Raises:
        RequestError: a field is missing or has another type; `param` names it.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise _with_path(error) from error


def check_model(request: _Request, served: tuple[str, ...]) -> None:
    """Check that the request names a model that is served; an absent name is the first one.

    Raises:
        RequestError: with code `model_not_found` and status 404.
    """
    if request.model is not None and request.model not in served:
        raise RequestError(
            f"model {request.model!r} is not served here; served: {', '.join(served)}",
            "model",
            "model_not_found",
            404,
        )


def request_error(error: ValueError) -> RequestError:
    """The same error with its field, where the message begins with one as SamplingParams' do."""
    if isinstance(error, RequestError):
        return error
    name = re.match(r"\w*", str(error))
    known = name is not None and name[0] in SamplingParams.__dataclass_fields__
    return RequestError(str(error), name[0] if name and known else None)


def _with_path(error: msgspec.ValidationError) -> RequestError:
    """Name the field before the complaint: msgspec writes "Expected ... - at `$.field`"."""
    complaint, _, path = str(error).partition(" - at `$")
    path = path.removesuffix("`").lstrip(".")
    missing = re.search(r"missing required field `(\w+)`", complaint)
    if missing and not path:
        return RequestError(f"{missing[1]} is missing", missing[1], "missing_required_parameter")
    name = re.match(r"\w*", path)
    param = name[0] if name and name[0] else None
    return RequestError(f"{path}: {complaint}" if path else complaint, param, "invalid_type")

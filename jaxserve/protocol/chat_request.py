"""The body of `/v1/chat/completions`: its JSON types, and what they ask of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.protocol.errors import RequestError
from jaxserve.protocol.messages import Message, template_variables
from jaxserve.protocol.shared import LEAVE_OUT, Prompt, SharedFields
from jaxserve.protocol.tools import Tool, ToolChoice, ToolUse, tool_use
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.protocol.answer_format import AnswerFormat
    from jaxserve.tokenizer import Tokenizer


class ChatCompletionRequest(SharedFields, kw_only=True):
    """Body of `/v1/chat/completions`.  `max_completion_tokens` wins over `max_tokens`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Given to the chat template under its own name.
    reasoning_effort: str | None = None
    # False keeps reasoning to the model.
    include_reasoning: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def sampling_params(
        self, answer_format: AnswerFormat | None = None, prompts: Sequence[Prompt] = ()
    ) -> SamplingParams:
        """What the request asks of the sampler.

        Args:
            answer_format: how the model writes reasoning and tool calls; None for plain text.
            prompts: of `prompts()`; where one has opened the model's reasoning, a constraint
                holds from the end of the reasoning on.

        Raises:
            RequestError: a value out of range, or a field that is not supported.
        """
        from jaxserve.protocol.chat_constraint import chat_constraint

        self._refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
        max_tokens = getattr(self, self._limit)
        if max_tokens == 0:
            raise RequestError(
                f"{self._limit}=0 generates nothing; ask for at least 1", self._limit
            )
        fields: dict[str, Any] = {}
        if answer_format is not None and answer_format.needs_special_tokens:
            fields["skip_special_tokens"] = False
        return self._params(
            max_tokens=max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            structured_outputs=chat_constraint(self, answer_format, prompts),
            **fields,
        )

    def tool_use(self) -> ToolUse:
        """What the request wants of its tools.

        Raises:
            RequestError: `tools` and `tool_choice` do not go together.
        """
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def prompts(self, tokenizer: Tokenizer) -> list[Prompt]:
        """Render and encode the conversation.  Special tokens in a message are plain text.

        Raises:
            RequestError: no messages, or content that is not text.
            ValueError: the model has no chat template, or it refuses the messages.
        """
        if not self.messages:
            raise RequestError("messages=[] has nothing to answer", "messages")
        variables = template_variables(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            variables = {"reasoning_effort": self.reasoning_effort, **variables}
        token_ids = tokenizer.encode_chat(
            [message.for_template() for message in self.messages],
            tools=self.tool_use().for_template(),
            add_generation_prompt=self.add_generation_prompt is not False,
            variables=variables,
        )
        return [Prompt(token_ids, None)]

    @property
    def _limit(self) -> str:
        """The field that says how many tokens there may be."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def _field_of(self, param: str | None) -> str | None:
        if param == "structured_outputs" and self.tool_use().is_forced:
            return "tools"
        own = {"logprobs": "top_logprobs", "max_tokens": self._limit}
        return own.get(param or "") or super()._field_of(param)

    def _refuse_unsupported(self) -> None:
        self._refuse(
            functions="use tools",
            function_call="use tool_choice",
            audio=LEAVE_OUT,
            web_search_options=LEAVE_OUT,
            continue_final_message=LEAVE_OUT,
            chat_template="start the server with --chat-template",
            documents="put them into a message",
            echo="use /v1/completions",
            add_special_tokens="the chat template writes them",
        )
        for name in ("functions", "function_call", "audio", "web_search_options"):
            if getattr(self, name) is not None:  # even an empty one asks for another answer
                raise RequestError(f"{name} is not supported; {LEAVE_OUT}", name)
        if self.modalities not in (None, ["text"]):
            raise RequestError(f"modalities={self.modalities!r}: only text is made", "modalities")

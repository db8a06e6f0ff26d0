"""The answer of either endpoint, streamed and not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from jaxserve.outputs import RequestOutput
from jaxserve.protocol.chat_answer import chat_choice
from jaxserve.protocol.chat_reader import chat_readers
from jaxserve.protocol.chat_request import ChatCompletionRequest
from jaxserve.protocol.chat_response import ChatCompletionResponse
from jaxserve.protocol.chat_stream import StreamedChat
from jaxserve.protocol.completion_request import CompletionRequest
from jaxserve.protocol.completion_response import CompletionResponse, completion_choice
from jaxserve.protocol.completion_stream import StreamedCompletion
from jaxserve.protocol.shared import Prompt
from jaxserve.protocol.streaming import Head, StreamedAnswer
from jaxserve.protocol.usage import usage

if TYPE_CHECKING:
    from jaxserve.protocol.answer_format import AnswerFormat
    from jaxserve.tokenizer import Tokenizer


def response_body(
    request: CompletionRequest | ChatCompletionRequest,
    prompts: list[Prompt],
    outputs: list[RequestOutput],
    tokenizer: Tokenizer,
    *,
    response_id: str,
    model: str,
    created: int,
    answer_format: AnswerFormat | None = None,
) -> CompletionResponse | ChatCompletionResponse:
    """The body that answers `request`.

    Args:
        request: what was asked.
        prompts: its prompts, in order.
        outputs: the finished output of each prompt, in the same order.
        tokenizer: for the texts and bytes of tokens.
        response_id: unique id, without the endpoint's prefix.
        model: the served model's name.
        created: Unix time in seconds.
        answer_format: how the model writes reasoning and tool calls; None for one that does not.
    """
    if isinstance(request, ChatCompletionRequest):
        readers = chat_readers(request, prompts[0], answer_format, response_id)
        return ChatCompletionResponse(
            id=f"chatcmpl-{response_id}",
            created=created,
            model=model,
            choices=[
                chat_choice(request, sample, reader, tokenizer)
                for sample, reader in zip(outputs[0].outputs, readers, strict=True)
            ],
            usage=usage(outputs),
            prompt_token_ids=prompts[0].token_ids if request.return_token_ids else UNSET,
        )
    samples = [
        (prompt, output, sample)
        for prompt, output in zip(prompts, outputs, strict=True)
        for sample in output.outputs
    ]
    return CompletionResponse(
        id=f"cmpl-{response_id}",
        created=created,
        model=model,
        choices=[
            completion_choice(index, request, prompt, output, sample, tokenizer)
            for index, (prompt, output, sample) in enumerate(samples)
        ],
        usage=usage(outputs),
    )


def streamed_answer(
    request: CompletionRequest | ChatCompletionRequest,
    prompts: list[Prompt],
    tokenizer: Tokenizer,
    *,
    response_id: str,
    model: str,
    created: int,
    answer_format: AnswerFormat | None = None,
) -> StreamedAnswer:
    """What turns the deltas of `request` into chunks.

    Args:
        request: what was asked.
        prompts: its prompts, in order.
        tokenizer: for the texts and bytes of tokens.
        response_id: unique id, without the endpoint's prefix.
        model: the served model's name.
        created: Unix time in seconds.
        answer_format: how the model writes reasoning and tool calls; None for one that does not.
    """
    if isinstance(request, ChatCompletionRequest):
        head = Head(f"chatcmpl-{response_id}", model, created)
        readers = list(chat_readers(request, prompts[0], answer_format, response_id))
        return StreamedChat(request, prompts, head, readers, tokenizer)
    head = Head(f"cmpl-{response_id}", model, created)
    return StreamedCompletion(request, prompts, head, tokenizer)

"""OpenAI requests and answers: their JSON types, what they ask of the engine, how outputs answer.

Knows names, types and defaults of `/v1/completions` and `/v1/chat/completions`, with vLLM's names
for what OpenAI lacks.  Does not know HTTP, batch files or the engine.

Unknown fields are ignored, as clients send many that change no answer (`metadata`, `store`...).
Known fields that would change the answer and are not supported are refused.  A JSON null is the
same as an absent field.  `user` says whose the request is, for the fair share.

How a model writes reasoning and tool calls is an `AnswerFormat` (`answer_format.py`), which has to
be imported by itself: it needs transformers.
"""

from __future__ import annotations

from jaxserve.protocol.chat_request import ChatCompletionRequest
from jaxserve.protocol.completion_request import CompletionRequest
from jaxserve.protocol.convert import check_model, convert_body
from jaxserve.protocol.errors import RequestError, error_body, failed_output, request_error
from jaxserve.protocol.response import response_body, streamed_answer
from jaxserve.protocol.shared import Prompt
from jaxserve.protocol.streaming import StreamedAnswer
from jaxserve.protocol.usage import usage

__all__ = [
    "ChatCompletionRequest",
    "CompletionRequest",
    "Prompt",
    "RequestError",
    "StreamedAnswer",
    "check_model",
    "convert_body",
    "error_body",
    "failed_output",
    "request_error",
    "response_body",
    "streamed_answer",
    "usage",
]

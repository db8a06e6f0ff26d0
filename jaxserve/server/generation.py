"""`/v1/completions` and `/v1/chat/completions`.

Knows the way of a request: check, admit, encode, submit, answer.  What the fields ask for and how
answers are written is `jaxserve.protocol`'s.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxserve.engine_requests import Ask
from jaxserve.outputs import RequestOutput
from jaxserve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    Prompt,
    StreamedAnswer,
    check_model,
    convert_body,
    response_body,
    streamed_answer,
)
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.body import read_json
from jaxserve.server.disconnect import aborted_on_disconnect
from jaxserve.server.errors import client_errors, error_response, json_response
from jaxserve.server.events import EventStream
from jaxserve.server.lengths import check_prompts, check_texts
from jaxserve.server.service import Open, Service

Asked = CompletionRequest | ChatCompletionRequest

LONG_TEXT = 4096
"""Characters from which on a prompt is encoded beside the event loop, so that streams go on."""


async def completions(request: Request) -> Any:
    """Complete prompts."""
    return await _answer(request, CompletionRequest)


async def chat_completions(request: Request) -> Any:
    """Answer a conversation."""
    return await _answer(request, ChatCompletionRequest)


async def _answer(request: Request, kind: type[Asked]) -> Any:
    service: Service = request.app.state.service
    service.check_admission()
    body = await read_json(request, service.config.max_body_bytes)
    with client_errors():
        asked: Asked = convert_body(body, kind)
        check_model(asked, service.names)
        prompts = await _encode(service, asked)
        params = asked.sampling_params(service.answer_format, prompts)
        check_prompts(asked, prompts, service.max_model_len, params.max_tokens)
    service.check_admission(len(prompts) * params.n)
    writer = _Writer(service, asked, prompts)
    name = request.headers.get("x-request-id") or asked.request_id
    entry = service.open(writer.full_id, name, asked.blame)
    headers = {"x-request-id": _header_text(name or writer.full_id)}
    try:
        with client_errors():
            await _submit(service, entry, asked, prompts, params)
        if asked.stream:
            return EventStream(service, entry, writer.stream(), headers)
        response = await _whole(request, service, entry, writer, headers)
    except BaseException:
        service.close(entry)
        raise
    service.close(entry)
    return response


async def _submit(
    service: Service, entry: Open, asked: Asked, prompts: list[Prompt], params: SamplingParams
) -> None:
    """Hand the prompts to the engine, all or none."""
    asks = [
        Ask(
            prompt_token_ids=prompt.token_ids,
            params=params,
            request_id=f"{entry.response_id}-{index}",
            prompt=prompt.text,
            priority=asked.priority or 0,
            key=asked.user or "",
            whole=not asked.stream,
        )
        for index, prompt in enumerate(prompts)
    ]
    try:
        answers = await service.llm.submit_all(asks, deadline_s=asked.timeout)
    except ValueError as error:
        raise asked.blame(error) from error
    entry.begin(answers)


async def _whole(
    request: Request, service: Service, entry: Open, writer: _Writer, headers: dict[str, str]
) -> Response:
    """The answer in one piece, once it is complete."""
    async with aborted_on_disconnect(request.receive, entry):
        outputs = [await answer.result() for answer in entry.answers]
    failure = service.failure(entry)
    if failure is not None:
        return error_response(failure, headers)
    return json_response(writer.body(outputs), headers=headers)


async def _encode(service: Service, asked: Asked) -> list[Prompt]:
    """The request's prompts as token ids."""
    tokenizer = service.llm.tokenizer
    if check_texts(asked, tokenizer, service.max_model_len) > LONG_TEXT:
        return await asyncio.to_thread(asked.prompts, tokenizer)
    return asked.prompts(tokenizer)


def _header_text(name: str) -> str:
    """A client's name for its request, as a header can carry it."""
    return "".join(char if " " <= char <= "~" else "?" for char in name)[:256]


class _Writer:
    """Makes the bodies of one answer, whole or streamed."""

    def __init__(self, service: Service, asked: Asked, prompts: list[Prompt]) -> None:
        self._tokenizer = service.llm.tokenizer
        self._asked = asked
        self._prompts = prompts
        name = uuid.uuid4().hex
        prefix = "chatcmpl" if isinstance(asked, ChatCompletionRequest) else "cmpl"
        self.full_id = f"{prefix}-{name}"
        """The id as the response shows it."""
        self._facts: dict[str, Any] = {
            "response_id": name,
            "model": asked.model or service.names[0],
            "created": int(time.time()),
            "answer_format": service.answer_format,
        }

    def body(self, outputs: list[RequestOutput]) -> Any:
        return response_body(self._asked, self._prompts, outputs, self._tokenizer, **self._facts)

    def stream(self) -> StreamedAnswer:
        return streamed_answer(self._asked, self._prompts, self._tokenizer, **self._facts)

"""`/tokenize`, `/detokenize` and `/tokenizer_info`: the model's tokenizer for clients without it.

Bodies are vLLM's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.protocol import RequestError, check_model, convert_body
from jaxserve.protocol.messages import Message, template_variables
from jaxserve.server.body import read_json
from jaxserve.server.errors import client_errors, json_response
from jaxserve.server.service import Service


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Answer of `/detokenize`."""

    prompt: str


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or a conversation."""
    service: Service = request.app.state.service
    body = await read_json(request, service.config.max_body_bytes)
    with client_errors():
        asked = convert_body(body, TokenizeRequest)
        check_model(asked, service.names)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if asked.messages == []:
            raise RequestError("messages=[] has nothing to encode", "messages")
        for name in ("chat_template", "continue_final_message"):
            if getattr(asked, name):
                raise RequestError(f"{name} is not supported; leave it out", name)
        ids = await asyncio.to_thread(_token_ids, service, asked)
    texts = service.llm.tokenizer.token_text
    answer = TokenizeResponse(
        count=len(ids),
        max_model_len=service.max_model_len,
        tokens=ids,
        token_strs=[texts(token) for token in ids] if asked.return_token_strs else None,
    )
    return json_response(answer)


def _token_ids(service: Service, asked: TokenizeRequest) -> list[int]:
    tokenizer = service.llm.tokenizer
    if asked.messages is not None:
        return tokenizer.encode_chat(
            [message.for_template() for message in asked.messages],
            tools=asked.tools,
            add_generation_prompt=asked.add_generation_prompt is not False,
            variables=template_variables(asked.chat_template_kwargs),
        )
    assert asked.prompt is not None
    return tokenizer.encode(asked.prompt, with_bos=asked.add_special_tokens is not False)


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    service: Service = request.app.state.service
    body = await read_json(request, service.config.max_body_bytes)
    asked = convert_body(body, DetokenizeRequest)
    check_model(asked, service.names)
    tokenizer = service.llm.tokenizer
    vocab = service.llm.model_config.vocab_size
    for token in asked.tokens:
        if not 0 <= token < vocab:
            raise RequestError(f"tokens has {token}, outside the vocabulary of {vocab}", "tokens")
    text = await asyncio.to_thread(tokenizer.decode, asked.tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(prompt=text))


async def tokenizer_info(request: Request) -> Response:
    """Names and ids of the special tokens, and the chat template, as tokenizer_config.json has."""
    service: Service = request.app.state.service
    tokenizer = service.llm.tokenizer
    return json_response(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{role: tokenizer.special_tokens.get(role) for role in _ROLES},
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "add_bos_token": tokenizer.adds_bos,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": service.max_model_len,
            "chat_template": tokenizer.chat_template,
        }
    )


_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")

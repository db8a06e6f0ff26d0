"""Response templates of common models, in transformers' declarative form.

Pure data, but for choosing one by what a chat template shows.  A model's own template, in its
tokenizer_config.json, comes before these.
"""

from __future__ import annotations

from typing import Any

_TURNS = [
    "<|im_start|>assistant\n",
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<｜Assistant｜>",  # noqa: RUF001  (DeepSeek's bars)
    "[/INST]",
]
"""How the assistant's turn begins in ChatML and in the formats of Llama 3, DeepSeek and Mistral."""

_CONTENT = {"content": "text"}
_THINK = {"open": "<think>", "close": "</think>", "content": "text"}
_FUNCTION = {"type": "function", "function": "{content}"}

_TOOL_CALL_JSON = {
    # The leading blanks separate calls, and calls from content.
    "open_pattern": r"\s*<tool_call>\n?",
    "close_pattern": r"\n?</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": _FUNCTION,
}
_TOOL_CALL_XML = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
    },
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
_LLAMA_3_JSON = {
    # A call is the whole answer: an object that begins with the function's name.
    "open_pattern": r'\A\s*(?:<\|python_tag\|>)?(?=\{\s*"name")',
    "close_pattern": r"<\|eo[mt]_id\|>",
    "repeats": True,
    "content": "json",
    "transform": {
        "type": "function",
        "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
    },
}
_JSON_LIST = {
    "repeats": True,
    "content": "json",
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
}


def _template(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"start_anchor": _TURNS, "fields": fields}


BUILT_IN: dict[str, dict[str, Any]] = {
    "think": _template(reasoning_content=_THINK, content=_CONTENT),
    "hermes": _template(tool_calls=_TOOL_CALL_JSON, content=_CONTENT),
    "qwen3": _template(reasoning_content=_THINK, tool_calls=_TOOL_CALL_JSON, content=_CONTENT),
    "qwen3-coder": _template(tool_calls=_TOOL_CALL_XML, content=_CONTENT),
    "qwen3.5": _template(reasoning_content=_THINK, tool_calls=_TOOL_CALL_XML, content=_CONTENT),
    "llama3-json": _template(tool_calls=_LLAMA_3_JSON, content=_CONTENT),
}
"""Templates by the names that `--response-template` takes."""

CALLS_ONLY = _template(tool_calls=_JSON_LIST)
"""An answer that is a JSON list of calls: what a model without a template is made to write."""


def detect(chat_template: str | None) -> dict[str, Any] | None:
    """The built-in template of a model whose chat template writes past answers like it."""
    text = chat_template or ""
    fields: dict[str, dict[str, Any]] = {}
    if "</think>" in text:
        fields["reasoning_content"] = _THINK
    if "<tool_call>" in text:
        fields["tool_calls"] = _TOOL_CALL_XML if "<function=" in text else _TOOL_CALL_JSON
    elif "<|python_tag|>" in text:
        fields["tool_calls"] = _LLAMA_3_JSON
    return _template(**fields, content=_CONTENT) if fields else None

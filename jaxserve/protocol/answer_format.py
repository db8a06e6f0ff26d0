"""How a model writes reasoning and tool calls: a response template, and the tokenizer it meets.

Chooses the template and answers questions about it.  Reading answers is `answer_parser.py`'s,
enforcing calls `grammars.py`'s.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.protocol.answer_parser import CALLS, REASONING, CompiledTemplate, TemplateParser
from jaxserve.protocol.answer_templates import BUILT_IN, CALLS_ONLY, detect
from jaxserve.protocol.call_syntax import CallSyntax, call_syntax
from jaxserve.protocol.marks import Marks
from jaxserve.protocol.parts import Reasoning
from jaxserve.protocol.shared import Prompt

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

_TAIL = 256
"""Tokens of a prompt that are searched for the beginning of the answer."""


class AnswerFormat:
    """How a model writes an answer.

    Args:
        template: a response template as transformers documents it.
        tokenizer: the model's; None where the template's marks are plain text and the prompt
            writes nothing of the answer.

    Raises:
        ValueError: it is not a valid response template.
    """

    def __init__(self, template: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> None:
        self.template = dict(template)
        self.marks = Marks({}) if tokenizer is None else Marks.of(tokenizer)
        self._tokenizer = tokenizer
        self._compiled = CompiledTemplate(template)

    @classmethod
    def check(cls, name: str | None) -> None:
        """Check a `--response-template` as far as it can be without the model.

        Raises:
            ValueError: as `choose`.
        """
        if name not in (None, "auto", "none", *BUILT_IN):
            cls(_read(str(name)))

    @classmethod
    def choose(cls, name: str | None, tokenizer: Tokenizer) -> AnswerFormat | None:
        """The format that a `--response-template` names.

        Args:
            name: "auto" or None, for the one that comes with the tokenizer, or else the one that
                its chat template shows; "none", for answers that are content only; a built-in
                template's name; or the path of a JSON file.
            tokenizer: the model's.

        Raises:
            ValueError: there is no such template, or it is not valid.
        """
        if name == "none":
            return None
        if name is None or name == "auto":
            template = tokenizer.response_template or detect(tokenizer.chat_template)
        else:
            template = BUILT_IN.get(name) or _read(name)
        return None if template is None else cls(template, tokenizer)

    @cached_property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The texts around reasoning, where the template has reasoning and fixed texts for it."""
        fields = self.template["fields"]
        field: Mapping[str, Any] = next((fields[name] for name in REASONING if name in fields), {})
        marks = [_first(field.get(which)) for which in ("open", "close")]
        return (marks[0], marks[1]) if marks[0] and marks[1] else None

    @cached_property
    def call_syntax(self) -> CallSyntax | None:
        """How to write a call, where the template tells."""
        syntax = call_syntax(self.template)
        return syntax if syntax and syntax.reads_back(self._compiled, "f") else None

    @cached_property
    def calls_can_repeat(self) -> bool:
        """Whether an answer can have several calls, one after another."""
        syntax = self.call_syntax
        return syntax is not None and syntax.reads_back(self._compiled, "f", "g")

    @cached_property
    def needs_special_tokens(self) -> bool:
        """Reasoning or calls have marks that decoding leaves out by default."""
        fields = self.template["fields"]
        texts: list[str] = []
        for field in (fields[name] for name in (*REASONING, CALLS) if name in fields):
            for key in ("open", "close", "open_pattern", "close_pattern"):
                value = field.get(key) or ""
                texts += [value] if isinstance(value, str) else value
        plain = [text.replace("\\", "") for text in texts]
        return any(mark in text for mark in self.marks.special for text in plain)

    @cached_property
    def forced(self) -> AnswerFormat:
        """The format of an answer that must consist of calls.

        The model's own where it is known how calls are written in it, and else a JSON list: there
        calls can be enforced, which `tool_choice` promises.
        """
        if self.call_syntax is not None:
            return self
        fields = self.template["fields"]
        reasoning = {name: fields[name] for name in REASONING if name in fields}
        template = {**self.template, "fields": {**CALLS_ONLY["fields"], **reasoning}}
        return AnswerFormat(template, self._tokenizer)

    def parser(
        self,
        prompt: Prompt,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        shows_special_tokens: bool = False,
    ) -> TemplateParser:
        """A parser for an answer to a prompt.

        Args:
            prompt: what the model was given.
            tools: the functions it may call, as JSON; without any, calls are content.
            shows_special_tokens: text of special tokens that is no mark is content, too.
        """
        hidden = self.marks.special if self.needs_special_tokens else frozenset[str]()
        return TemplateParser(
            self._compiled,
            self._begun(prompt),
            tools,
            hidden=frozenset() if shows_special_tokens else hidden,
        )

    def reasoning_ahead(self, prompts: Sequence[Prompt]) -> Reasoning:
        """Whether the answer to a prompt begins with reasoning."""
        if self.reasoning_marks is None:
            return Reasoning.NONE
        parser = self.parser(prompts[0]) if prompts else None
        if parser is not None and parser.in_reasoning:
            return Reasoning.OPEN
        return Reasoning.NONE if parser and parser.has_reasoned else Reasoning.POSSIBLE

    def _begun(self, prompt: Prompt) -> str:
        """What the prompt has written of the answer."""
        if self._tokenizer is None:
            return ""
        tail = self._tokenizer.decode(prompt.token_ids[-_TAIL:], skip_special_tokens=False)
        return self._compiled.after_anchor(tail)


def forced_format(answer_format: AnswerFormat | None) -> AnswerFormat:
    """The format of an answer that must consist of calls, by a model of a format."""
    return _calls_only() if answer_format is None else answer_format.forced


@functools.cache
def _calls_only() -> AnswerFormat:
    return AnswerFormat(CALLS_ONLY)


def _first(mark: str | list[str] | None) -> str | None:
    return mark[0] if isinstance(mark, list) else mark


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ValueError(
            f"response template {path!r} is neither a file nor one of auto, none, "
            f"{', '.join(BUILT_IN)}"
        )
    try:
        template = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"response template {path} is not valid JSON: {error}") from error
    if not isinstance(template, dict):
        raise ValueError(f"response template {path} is not a JSON object")
    return template

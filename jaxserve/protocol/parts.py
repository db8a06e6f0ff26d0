"""What an answer's text consists of: content, reasoning and tool calls.

Knows no way of writing them (`answer_format.py`) and no JSON types of answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol


class Reasoning(Enum):
    """Whether a model reasons before it answers."""

    NONE = auto()
    """It does not, or it has done so in the prompt."""
    POSSIBLE = auto()
    """It may begin its answer with reasoning."""
    OPEN = auto()
    """The prompt has begun its reasoning, which the answer goes on with."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """JSON text, as the model meant it; nothing promises that it fits the function's schema
    unless a grammar enforced it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A piece of an answer, taken apart."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, later: Parts) -> Parts:
        return Parts(
            self.content + later.content,
            self.reasoning + later.reasoning,
            self.tool_calls + later.tool_calls,
        )

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class AnswerParser(Protocol):
    """Takes one answer apart as its text arrives."""

    def push(self, text: str) -> Parts:
        """The parts that are certain now."""
        ...

    def end(self) -> Parts:
        """The rest, once no more text comes."""
        ...


class PlainText:
    """Parses an answer that is content only."""

    def push(self, text: str) -> Parts:
        """All of it is content."""
        return Parts(content=text)

    def end(self) -> Parts:
        """Nothing is held back."""
        return Parts()

"""What the text of an answer must look like: vLLM's names for constraints on generation.

Plain data and its validation.  Does not know grammars' meaning (`jaxserve/grammar`), requests or
the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""The ways to constrain an answer, of which a request uses one."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the text of an answer; exactly one of `KINDS`.

    Raises:
        ValueError: none or several are given, or one has the wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as an object: the answer is a JSON value that it validates."""
    regex: str | None = None
    """The whole answer matches it."""
    choice: tuple[str, ...] | list[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in Lark's or GBNF's notation, whose start the answer derives from."""
    json_object: bool | None = None
    """True: the answer is any JSON object."""

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs has {', '.join(given) or 'no constraint'}; give exactly one "
                f"of {', '.join(KINDS)}"
            )
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"structured_outputs.{name}={value!r} must be a non-empty string")
        if self.json is not None and not isinstance(self.json, (str, Mapping)):
            raise ValueError(f"structured_outputs.json={self.json!r} must be an object or its text")
        if self.json_object not in (None, True, False):
            raise ValueError(f"structured_outputs.json_object={self.json_object!r} must be true")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @property
    def kind(self) -> str:
        """Which of `KINDS` it is."""
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))


def _choices(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"structured_outputs.choice={value!r} must be a list of texts")
    if any(not isinstance(text, str) or not text for text in value):
        raise ValueError(f"structured_outputs.choice={value!r} must hold non-empty texts only")
    return tuple(value)

"""Tools of a chat request, and which of them the answer may or must call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from jaxserve.protocol.errors import RequestError


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call.  `strict` makes no difference: see `ToolUse`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates know it."""
        function = self.function
        fields = {"description": function.description, "parameters": function.parameters}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": {"name": function.name, **given}}


class FunctionName(msgspec.Struct):
    """A function by its name."""

    name: str


class NamedTool(msgspec.Struct, tag_field="type", tag="function"):
    """`tool_choice` of one function."""

    function: FunctionName


class AllowedNames(msgspec.Struct):
    """Some of the tools, of which the answer may or must call some."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    """`tool_choice` of some of the tools."""

    allowed_tools: AllowedNames


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request wants of its tools."""

    tools: tuple[Tool, ...]
    """What the model is shown, and what the answer may call."""
    is_forced: bool = False
    """The answer must consist of calls; then their arguments fit their functions' schemas."""
    is_named: bool = False
    """The request named the one function to call."""
    allows_many: bool = True
    """The answer may have several calls."""

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates know them."""
        return [tool.for_template() for tool in self.tools] or None


def tool_use(tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        RequestError: the choice needs tools that are not there, or two have one name.
    """
    by_name = {tool.function.name: tool for tool in tools or ()}
    if len(by_name) != len(tools or ()) or "" in by_name:
        raise RequestError("tools: the names of functions must differ and not be empty", "tools")
    if choice == "none":
        return ToolUse(())
    if isinstance(choice, AllowedTools):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        chosen = _chosen(by_name, names)
        return ToolUse(
            chosen, choice.allowed_tools.mode == "required", False, parallel is not False
        )
    if isinstance(choice, NamedTool):
        return ToolUse(_chosen(by_name, [choice.function.name]), True, True, False)
    if choice == "required" and not by_name:
        raise RequestError("tool_choice='required' needs tools; give some", "tool_choice")
    return ToolUse(tuple(by_name.values()), choice == "required", False, parallel is not False)


def _chosen(by_name: dict[str, Tool], names: list[str]) -> tuple[Tool, ...]:
    missing = [name for name in names if name not in by_name]
    if missing or not names:
        raise RequestError(
            f"tool_choice names {missing[0] if missing else 'no function'!r}; tools has "
            f"{', '.join(map(repr, by_name)) or 'none'}",
            "tool_choice",
        )
    return tuple(by_name[name] for name in dict.fromkeys(names))

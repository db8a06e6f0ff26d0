"""What the text of a chat answer must look like: forced calls, constraints, reasoning before them.

Turns a request's wishes into a constraint of the engine's, in the model's own format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.protocol.constraints import constraint
from jaxserve.protocol.errors import RequestError
from jaxserve.protocol.grammars import (
    after_reasoning,
    calls_grammar,
    constraint_grammar,
    grammar_text,
)
from jaxserve.protocol.parts import Reasoning
from jaxserve.structured import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxserve.protocol.answer_format import AnswerFormat
    from jaxserve.protocol.chat_request import ChatCompletionRequest
    from jaxserve.protocol.shared import Prompt
    from jaxserve.protocol.tools import ToolUse


def chat_constraint(
    request: ChatCompletionRequest, answer_format: AnswerFormat | None, prompts: Sequence[Prompt]
) -> StructuredOutputsParams | None:
    """The constraint that a request puts on its answer, if it puts one.

    Raises:
        RequestError: two fields constrain the answer, or the model's format takes a call for
            reasoning.
    """
    asked = constraint(request.response_format, request.structured_outputs)
    use = request.tool_use()
    if use.is_forced:
        if request.structured_outputs is not None:
            raise RequestError(
                "structured_outputs and tool_choice both constrain the answer; give one",
                "structured_outputs",
            )
        return _forced_calls(use, answer_format, prompts)
    if asked is None or answer_format is None:
        return asked
    ahead = answer_format.reasoning_ahead(prompts)
    rules = None if ahead is Reasoning.NONE else constraint_grammar(asked, answer_format.marks)
    return asked if rules is None else _after_reasoning(rules, answer_format, ahead)


def _forced_calls(
    use: ToolUse, answer_format: AnswerFormat | None, prompts: Sequence[Prompt]
) -> StructuredOutputsParams:
    from jaxserve.protocol.answer_format import forced_format

    forced = forced_format(answer_format)
    if forced.call_syntax is None:
        raise RequestError(
            "tool_choice: calls cannot be told from reasoning in this model's format; use 'auto'",
            "tool_choice",
        )
    rules = calls_grammar(
        forced.call_syntax,
        {tool.function.name: tool.function.parameters for tool in use.tools},
        forced.marks,
        allows_many=use.allows_many and forced.calls_can_repeat,
    )
    return _after_reasoning(rules, forced, forced.reasoning_ahead(prompts))


def _after_reasoning(
    rules: dict[str, str], answer_format: AnswerFormat, ahead: Reasoning
) -> StructuredOutputsParams:
    if ahead is not Reasoning.NONE:
        assert answer_format.reasoning_marks is not None
        rules = after_reasoning(
            rules,
            answer_format.marks,
            *answer_format.reasoning_marks,
            is_open=ahead is Reasoning.OPEN,
        )
    return StructuredOutputsParams(grammar=grammar_text(rules))

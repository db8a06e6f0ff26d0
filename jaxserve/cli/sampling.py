"""Flags for every field of SamplingParams.

Knows their help texts and how the structured ones are written on a command line.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Callable
from typing import Any

import click

from jaxserve.cli.base import Decorated, SectionOption
from jaxserve.cli.options import IntList, field_option
from jaxserve.sampling_params import SamplingParams

_HELP = {
    "n": "Samples per prompt.",
    "temperature": "0 takes the most likely token; higher is more varied.",
    "top_p": "Keep the likeliest tokens of this total probability; 1 keeps all.",
    "top_k": "Keep this many of the likeliest tokens; 0 or -1 keeps all.",
    "min_p": "Keep tokens of at least this share of the likeliest one's probability.",
    "presence_penalty": "Lower tokens that were generated before.",
    "frequency_penalty": "Lower tokens by how often they were generated.",
    "repetition_penalty": "Above 1, lower tokens of the prompt and of the answer.",
    "seed": "Makes the answer reproducible, whatever else runs.",
    "stop": "End before this text; may be repeated.",
    "stop_token_ids": "End at any of these tokens.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "max_tokens": "Most tokens to generate; the context limit cuts it.",
    "min_tokens": "Do not end before this many tokens.",
    "logprobs": "Report the sampled token's and this many top log-probabilities (with --json).",
    "prompt_logprobs": "The same for the prompt's tokens (with --json).",
    "logit_bias": "ID=VALUE to add to a token's logit; may be repeated.",
    "allowed_token_ids": "Generate only these tokens.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "include_stop_str_in_output": "Keep the stop text in the answer.",
    "detokenize": "Make text of the tokens.",
    "structured_outputs": "Constraint on the text as a JSON object, such as "
    """'{"regex": "[0-9]+"}' or '{"json": SCHEMA}'.""",
}
_SECTION = "Sampling options"


class _Bias(click.ParamType[tuple[str, float]]):
    name = "id=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value[0], value[1]
        token, _, bias = str(value).partition("=")
        try:
            return token, float(bias)
        except ValueError:
            self.fail(f"{value!r} is not ID=VALUE, such as 42=-100", param, ctx)


class _Json(click.ParamType[Any]):
    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # of a profile
        try:
            return json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is not JSON: {error}", param, ctx)


def sampling_options(**defaults: Any) -> Callable[[Decorated], Decorated]:
    """Add a flag per field of SamplingParams; the verb gets one `params`.

    Args:
        defaults: values to use instead of SamplingParams' own.
    """
    fields = dataclasses.fields(SamplingParams)
    hints = typing.get_type_hints(SamplingParams)

    def decorate(function: Decorated) -> Decorated:
        @functools.wraps(function)
        def verb(**kwargs: Any) -> Any:
            values = {field.name: kwargs.pop(field.name) for field in fields}
            values["stop"] = list(values["stop"])
            values["logit_bias"] = dict(values["logit_bias"]) or None
            return function(params=SamplingParams(**values), **kwargs)

        for field in reversed(fields):
            verb = _option(field, hints[field.name], defaults)(verb)
        return typing.cast(Decorated, verb)

    return decorate


def _option(
    field: dataclasses.Field[Any], hint: Any, defaults: dict[str, Any]
) -> Callable[[Decorated], Decorated]:
    help = _HELP[field.name]
    flag = "--" + field.name.replace("_", "-")
    common: dict[str, Any] = {"cls": SectionOption, "section": _SECTION, "help": help}
    if field.name == "n":
        return click.option("-n", "--n", type=int, default=field.default, **common)
    if field.name == "stop":
        return click.option(flag, "stop", multiple=True, **common)
    if field.name == "logit_bias":
        return click.option(flag, "logit_bias", multiple=True, type=_Bias(), **common)
    if field.name == "structured_outputs":
        return click.option(flag, field.name, type=_Json(), **common)
    if field.name.endswith("token_ids"):
        return click.option(flag, field.name, type=IntList(), **common)
    return field_option(
        field,
        hint,
        help=help,
        section=_SECTION,
        default=defaults.get(field.name, field.default),
    )

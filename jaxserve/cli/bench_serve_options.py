"""Options of `jaxserve bench serve`: who is asked, and what.

Knows flags.  Does not know how a load is run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import click
import msgspec

from jaxserve.bench.serve_data import Ask, RandomData, read_asks
from jaxserve.cli.base import Decorated, SectionOption

_NUM_RANDOM = 64
_POSITIVE = click.IntRange(min=1)


class FloatList(click.ParamType[tuple[float, ...]]):
    """Numbers separated by commas."""

    name = "float,float,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        """Parse "0.5,1,2"; a tuple is left as it is."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 0.5,1,2", param, ctx)


class JsonObject(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """Parse it; a dict is left as it is."""
        if isinstance(value, dict):
            return value
        try:
            return msgspec.json.decode(str(value), type=dict[str, Any])
        except msgspec.DecodeError as error:
            self.fail(f"{value!r} is not a JSON object: {error}", param, ctx)


@dataclass(frozen=True, slots=True)
class AskOptions:
    """Who is asked, and how."""

    url: str
    model: str | None
    api_key: str | None
    endpoint: str
    ignore_eos: bool | None
    temperature: float
    extra_body: dict[str, Any] | None
    timeout: float

    def body(self, *, is_synthetic: bool) -> dict[str, Any]:
        """What every body has beside the prompt and its lengths.

        Args:
            is_synthetic: prompts are random, which a model may well answer with an end token.
        """
        ignore_eos = is_synthetic if self.ignore_eos is None else self.ignore_eos
        body = {"temperature": self.temperature, **({"ignore_eos": True} if ignore_eos else {})}
        return body | (self.extra_body or {})


@dataclass(frozen=True, slots=True)
class DataOptions:
    """What is asked, before the server's vocabulary is known."""

    workload: str | None
    num_prompts: int | None
    prompt_tokens: int
    output_tokens: int
    length_spread: float
    prefix_tokens: int
    num_prefixes: int
    vocab_size: int | None
    load_seed: int

    @property
    def is_synthetic(self) -> bool:
        """Prompts are random."""
        return self.workload is None

    def asks(self, vocab_size: int | None, run: int) -> list[Ask]:
        """The requests of one run.

        Args:
            vocab_size: of the model; random prompts are words where it is not known.
            run: its number; each has other random prompts.

        Raises:
            ValueError: the file cannot be used, or a number is out of range.
        """
        if self.workload is not None:
            return read_asks(self.workload, self.num_prompts, output_tokens=self.output_tokens)
        data = RandomData(
            num_requests=self.num_prompts or _NUM_RANDOM,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            length_spread=self.length_spread,
            prefix_tokens=self.prefix_tokens,
            num_prefixes=self.num_prefixes,
            seed=self.load_seed,
        )
        return data.asks(vocab_size, run)

    def to_dict(self, vocab_size: int | None) -> dict[str, Any]:
        """What is asked, for the file of results."""
        names = ["workload", "num_prompts", "output_tokens"]
        if self.is_synthetic:
            names += ["prompt_tokens", "length_spread", "prefix_tokens", "num_prefixes"]
        values = {name: getattr(self, name) for name in names}
        if self.is_synthetic:
            values["prompts_are"] = "words" if vocab_size is None else "token ids"
        return {**values, "seed": self.load_seed}


_ASK_FLAGS = (
    click.option("--url", default="http://127.0.0.1:8000", help="Of the server, without /v1."),
    click.option("--model", metavar="NAME", help="To ask for; the server's first if absent."),
    click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as a bearer token."),
    click.option(
        "--endpoint",
        type=click.Choice(["completions", "chat"]),
        default="completions",
        help="Which of the two is asked.",
    ),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=None,
        help="Ask for max_tokens whatever the model says; on for random prompts.",
    ),
    click.option("--temperature", type=float, default=0.0, help="Of every request."),
    click.option("--extra-body", type=JsonObject(), help="Further fields of every body."),
    click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        default=600.0,
        help="Seconds of silence after which a request has failed.",
    ),
)


def _data_option(*flags: str, **settings: Any) -> Any:
    return click.option(*flags, cls=SectionOption, section="Data options", **settings)


_DATA_FLAGS = (
    _data_option(
        "--workload",
        metavar="FILE",
        help='JSON list, or JSON per line, of {"prompt", "prompt_token_ids", "messages" or '
        'ShareGPT\'s "conversations", and "max_tokens"}; random prompts if absent.',
    ),
    _data_option(
        "--num-prompts",
        type=_POSITIVE,
        help=f"The first so many of the workload, or so many random ones; {_NUM_RANDOM} of these "
        "if absent.",
    ),
    _data_option("--prompt-tokens", type=_POSITIVE, default=128, help="Of a random prompt."),
    _data_option(
        "--output-tokens",
        type=_POSITIVE,
        default=64,
        help="Of an answer, where the workload does not say.",
    ),
    _data_option(
        "--length-spread",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.2,
        help="Lengths of random prompts and answers differ by up to this share of the mean.",
    ),
    _data_option(
        "--prefix-tokens",
        type=click.IntRange(min=0),
        default=0,
        help="Length of a beginning that random prompts share, beside --prompt-tokens.",
    ),
    _data_option(
        "--num-prefixes", type=_POSITIVE, default=1, help="How many such beginnings there are."
    ),
    _data_option(
        "--vocab-size",
        type=_POSITIVE,
        help="Random prompts of completions are token ids below this; by default the server's, or "
        "words where it does not say.",
    ),
    _data_option("--load-seed", type=int, default=0, help="Of random prompts and arrivals."),
)


def _grouped(
    name: str, kind: type[AskOptions] | type[DataOptions], flags: tuple[Any, ...]
) -> Callable[[Decorated], Decorated]:
    def decorate(function: Decorated) -> Decorated:
        @functools.wraps(function)
        def verb(**kwargs: Any) -> Any:
            values = {field: kwargs.pop(field) for field in kind.__slots__}
            return function(**{name: kind(**values)}, **kwargs)

        for option in reversed(flags):
            verb = option(verb)
        return cast(Decorated, verb)

    return decorate


ask_options = _grouped("ask_options", AskOptions, _ASK_FLAGS)
"""Adds the flags of `AskOptions`; the verb gets one `ask_options`."""
data_options = _grouped("data_options", DataOptions, _DATA_FLAGS)
"""Adds the flags of `DataOptions`; the verb gets one `data_options`."""

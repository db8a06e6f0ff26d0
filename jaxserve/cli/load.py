"""Options that say what a server is asked, what it must keep, and what it costs.

`bench sweep` and `tune` share them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import click

from jaxserve.bench.load import Encode, Load, make_load, synthetic
from jaxserve.bench.throughput import WorkloadRequest, read_workload
from jaxserve.cli.base import Decorated, SectionOption
from scheduler.summary import Bounds


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The flags, before a vocabulary is known."""

    workload: str | None
    num_prompts: int | None
    prompt_tokens: int
    output_tokens: int
    length_spread: float
    request_rate: float | None
    closed_loop: bool
    load_seed: int

    @property
    def is_synthetic(self) -> bool:
        """Random tokens, which a model may well answer with an end token: it is ignored."""
        return self.workload is None

    def load(self, vocab_size: int, encode: Encode | None) -> Load:
        """Read or make the requests.

        Args:
            vocab_size: random token ids are below this.
            encode: text to token ids; None if there is no tokenizer.

        Raises:
            ValueError: the workload cannot be read or encoded, or a number is out of range.
        """
        return make_load(
            self._requests(vocab_size),
            encode,
            request_rate=self.request_rate,
            closed_loop=self.closed_loop,
            seed=self.load_seed,
        )

    def _requests(self, vocab_size: int) -> list[WorkloadRequest]:
        if self.workload is not None:
            return read_workload(self.workload, self.num_prompts)
        return synthetic(
            self.num_prompts or _NUM_SYNTHETIC,
            self.prompt_tokens,
            self.output_tokens,
            self.length_spread,
            vocab_size,
            self.load_seed,
        )

    @property
    def words(self) -> str:
        """What is asked, in a line."""
        what = self.workload or (
            f"{self.num_prompts or _NUM_SYNTHETIC} random requests of about "
            f"{self.prompt_tokens} + {self.output_tokens} tokens"
        )
        if self.closed_loop:
            return f"{what}, as many users as slots"
        if self.request_rate is None:
            return f"{what}, all at once"
        return f"{what}, {self.request_rate:g} a second"

    def to_dict(self) -> dict[str, Any]:
        """What is asked, for the file of results."""
        lengths = {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "length_spread": self.length_spread,
        }
        return {
            "workload": self.workload,
            **(lengths if self.is_synthetic else {}),
            "request_rate": self.request_rate,
            "closed_loop": self.closed_loop,
            "seed": self.load_seed,
        }


_NUM_SYNTHETIC = 64
_SECTION = "Load options"


def _option(*flags: str, **settings: Any) -> Any:
    return click.option(*flags, cls=SectionOption, section=_SECTION, **settings)


_POSITIVE = click.IntRange(min=1)
_LOAD_FLAGS = (
    _option(
        "--workload",
        metavar="FILE",
        help='JSON list of {"prompt_token_ids" or "prompt", "max_tokens"}; random requests if '
        "absent.",
    ),
    _option(
        "--num-prompts",
        type=_POSITIVE,
        help=f"The first so many of the workload, or so many random ones; {_NUM_SYNTHETIC} of "
        "these if absent.",
    ),
    _option("--prompt-tokens", type=_POSITIVE, default=128, help="Of a random request."),
    _option("--output-tokens", type=_POSITIVE, default=64, help="Of a random request."),
    _option(
        "--length-spread",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.2,
        help="Lengths of random requests differ by up to this share of the mean.",
    ),
    _option(
        "--request-rate",
        type=click.FloatRange(0, min_open=True),
        help="Arrivals per second (Poisson).",
    ),
    _option("--load-seed", type=int, default=0, help="Of random requests and arrivals."),
)


def load_options(*, closed_loop: bool) -> Callable[[Decorated], Decorated]:
    """Add the flags; the verb gets one `load_options`.

    Args:
        closed_loop: the verb's default where no rate is given.
    """

    def decorate(function: Decorated) -> Decorated:
        @functools.wraps(function)
        def verb(**kwargs: Any) -> Any:
            values = {name: kwargs.pop(name) for name in LoadOptions.__slots__}
            if values["closed_loop"] is None:
                values["closed_loop"] = closed_loop and values["request_rate"] is None
            return function(load_options=LoadOptions(**values), **kwargs)

        default = "; on unless there is a rate" if closed_loop else ""
        loop = _option(
            "--closed-loop/--no-closed-loop",
            default=None,
            help="As many users as slots, each of whom asks again when answered, so that nothing "
            f"queues.  Without this and --request-rate, all ask at once{default}.",
        )
        for option in (loop, *reversed(_LOAD_FLAGS)):
            verb = option(verb)
        return cast(Decorated, verb)

    return decorate


def bound_options(
    *, ttft_ms: float | None, tpot_ms: float | None
) -> Callable[[Decorated], Decorated]:
    """Add `--max-ttft-ms`, `--max-tpot-ms` and `--cost-per-hour`; the verb gets `bounds`.

    Args:
        ttft_ms: default bound of the time to the first token.
        tpot_ms: default bound of the time per output token.
    """
    positive = click.FloatRange(0, min_open=True)

    def decorate(function: Decorated) -> Decorated:
        @functools.wraps(function)
        def verb(max_ttft_ms: float | None, max_tpot_ms: float | None, **kwargs: Any) -> Any:
            return function(bounds=Bounds(_s(max_ttft_ms), _s(max_tpot_ms)), **kwargs)

        for option in (
            click.option(
                "--cost-per-hour",
                type=positive,
                help="Price of the machine, for the cost of a million output tokens.",
            ),
            click.option(
                "--max-tpot-ms",
                type=positive,
                default=tpot_ms,
                help="Bound of a request's mean time per output token after the first.",
            ),
            click.option(
                "--max-ttft-ms",
                type=positive,
                default=ttft_ms,
                help="Bound of a request's time to the first token.",
            ),
        ):
            verb = option(verb)
        return cast(Decorated, verb)

    return decorate


def _s(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3

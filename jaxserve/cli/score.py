"""`jaxserve score`: how likely texts are under the model."""

from __future__ import annotations

import math
from typing import Any

import click
import msgspec

from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.model import load_llm
from jaxserve.cli.options import engine_options
from jaxserve.cli.prompts import Prompt, prompt_file_option, read_prompts
from jaxserve.cli.tables import table
from jaxserve.config import EngineConfig
from jaxserve.outputs import ScoreOutput

_SHOWN_CHARACTERS = 40


@click.command("score", cls=Verb)
@click.argument("texts", nargs=-1)
@prompt_file_option
@click.option("--json", is_flag=True, help="One JSON object per text and line.")
@log_option
@engine_options(warm_up=False)
def command(
    texts: tuple[str, ...], prompt_file: str | None, json: bool, config: EngineConfig
) -> None:
    """Log-likelihood and perplexity of TEXTS, or of those in a file or on stdin.

    Each object of --json has text, token_ids, token_logprobs (nats; the first token has none),
    log_likelihood, mean_nll and perplexity.
    """
    wanted = read_prompts(texts, prompt_file)
    scores = load_llm(config).score([_as_input(prompt) for prompt in wanted])
    if json:
        for score in scores:
            click.echo(msgspec.json.encode(_record(score)))
    else:
        header = ("tokens", "log-likelihood", "mean NLL", "perplexity", "text")
        click.echo(table(header, [_row(score) for score in scores]))


def _as_input(prompt: Prompt) -> Any:
    if prompt.token_ids is None:
        return prompt.text
    return {"prompt_token_ids": prompt.token_ids}


def _record(score: ScoreOutput) -> dict[str, Any]:
    """The score's figures; those of a text of one token are NaN, null in JSON."""
    return {
        "text": score.text,
        "token_ids": score.token_ids,
        "token_logprobs": score.token_logprobs,
        "log_likelihood": score.log_likelihood,
        "mean_nll": score.mean_nll,
        "perplexity": _perplexity(score),
    }


def _perplexity(score: ScoreOutput) -> float:
    """Infinite where exp would overflow."""
    try:
        return score.perplexity
    except OverflowError:
        return math.inf


def _row(score: ScoreOutput) -> tuple[str, ...]:
    text = " ".join((score.text or "").split())
    if len(text) > _SHOWN_CHARACTERS:
        text = text[: _SHOWN_CHARACTERS - 1] + "…"
    return (
        str(len(score.token_ids)),
        f"{score.log_likelihood:.3f}",
        f"{score.mean_nll:.4f}",
        f"{_perplexity(score):.3f}",
        text,
    )

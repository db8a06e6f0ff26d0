"""`jaxserve bench serve`: load on a running server, and what its clients see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from jaxserve.cli.base import Verb, log_option
from jaxserve.cli.bench_serve_options import (
    AskOptions,
    DataOptions,
    FloatList,
    ask_options,
    data_options,
)
from jaxserve.cli.load import bound_options
from jaxserve.cli.options import IntList, config_option
from jaxserve.cli.tables import table
from scheduler.summary import Bounds

if TYPE_CHECKING:
    from jaxserve.bench.serve import Loop, Server
    from jaxserve.bench.serve_client import Answered

_USERS = 32


@click.command("serve", cls=Verb)
@ask_options
@click.option(
    "--request-rate", type=FloatList(), help="Open loop: mean arrivals per second, a run each."
)
@click.option(
    "--burstiness",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    help="Shape of the Gamma distribution of the gaps between arrivals: 1 is Poisson, below it "
    "they come in bursts, above it more evenly.",
)
@click.option(
    "--concurrency",
    type=IntList(),
    help="Closed loop: users who ask again as soon as they are answered, a run each; "
    f"{_USERS} if there is no --request-rate.",
)
@click.option(
    "--num-warmups", type=click.IntRange(min=0), default=1, help="Requests before the first run."
)
@bound_options(ttft_ms=None, tpot_ms=None)
@click.option("--json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--save-result", metavar="FILE", help="Write the JSON object here, too.")
@click.option("--details", is_flag=True, help="With every request's times in the JSON object.")
@click.option("--label", help="Name of the curve that `jaxserve plot` draws.")
@log_option
@config_option
@data_options
def command(
    request_rate: tuple[float, ...] | None,
    burstiness: float,
    concurrency: tuple[int, ...] | None,
    num_warmups: int,
    bounds: Bounds,
    cost_per_hour: float | None,
    json: bool,
    save_result: str | None,
    details: bool,
    label: str | None,
    ask_options: AskOptions,
    data_options: DataOptions,
) -> None:
    """Put a load on an OpenAI server and measure what its clients see.

    TTFT is the time to the first text, TPOT the mean time per further token, ITL the time between
    two chunks, of which one may hold several tokens, and E2E the time to the last.  In an open loop
    they count from when a request was due.  Goodput is requests per second that kept the bounds.
    `jaxserve plot` draws the file of --save-result.

    Exit code: 1 if a request failed; being refused with 429 or 503 is a result.
    """
    from jaxserve.bench.serve import figures, look, loops

    users = () if request_rate else (_USERS,)
    chosen = list(loops(request_rate or (), concurrency or users, burstiness))
    server = _server(ask_options, data_options)
    found = look(server)
    is_chat = server.endpoint == "chat"
    vocab_size = None if is_chat else data_options.vocab_size or found.vocab_size
    rows = []
    for loop, answers in _runs(server, found.model, chosen, data_options, vocab_size, num_warmups):
        row = {**loop.key, **figures(answers, bounds=bounds, cost_per_hour=cost_per_hour)}
        if details:
            row["requests"] = [one.to_dict() for one in answers]
        rows.append(row)
    report = {
        "label": label,
        "url": server.url,
        "model": found.model,
        "endpoint": server.endpoint,
        "load": {
            **data_options.to_dict(vocab_size),
            "burstiness": burstiness if request_rate else None,
            "body": server.extra_body,
        },
        "max_ttft_s": bounds.ttft_s,
        "max_tpot_s": bounds.tpot_s,
        "cost_per_hour": cost_per_hour,
        "rows": rows,
    }
    encoded = msgspec.json.encode(report)
    if save_result is not None:
        Path(save_result).write_bytes(encoded + b"\n")
    click.echo(encoded if json else _text(chosen, rows))
    _complain(rows)


def _server(asked: AskOptions, data: DataOptions) -> Server:
    from jaxserve.bench.serve import Server

    return Server(
        url=asked.url,
        model=asked.model,
        api_key=asked.api_key,
        endpoint=asked.endpoint,
        extra_body=asked.body(is_synthetic=data.is_synthetic),
        timeout_s=asked.timeout,
    )


def _runs(
    server: Server,
    model: str,
    chosen: Sequence[Loop],
    data: DataOptions,
    vocab_size: int | None,
    num_warmups: int,
) -> Iterator[tuple[Loop, list[Answered]]]:
    from tqdm import tqdm

    from jaxserve.bench.serve import run_load

    for number, loop in enumerate(chosen):
        asks = data.asks(vocab_size, number)
        with tqdm(total=len(asks), desc=loop.words, unit="request", disable=None) as bar:
            answers = run_load(
                server,
                model,
                loop,
                asks,
                seed=data.load_seed,
                num_warmups=0 if number else num_warmups,
                on_answer=bar.update,
            )
        yield loop, answers


def _complain(rows: Sequence[dict[str, Any]]) -> None:
    """Say why requests have no answer; exit with 1 if it is for another reason than the load."""
    errors: Counter[str] = Counter()
    for row in rows:
        errors.update(row["errors"])
    for message, count in errors.most_common():
        click.echo(f"{count} without an answer: {message}", err=True)
    if any(row["num_failed"] for row in rows):
        raise click.exceptions.Exit(1)


_LATENCIES = ("ttft", "tpot", "itl", "e2e")
_PARTS = ("mean", "p50", "p99")
_EXTRAS = {"goodput/s": "goodput_requests_per_s", "cost/M tokens": "cost_per_million_tokens"}


def _text(chosen: Sequence[Loop], rows: Sequence[dict[str, Any]]) -> str:
    """A line per run."""
    extras = {k: v for k, v in _EXTRAS.items() if any(row[v] is not None for row in rows)}
    latencies = [f"{name.upper()} mean/P50/P99" for name in _LATENCIES]
    rates = ["requests_per_s", "output_tokens_per_s"]
    counts = ["answered", "refused", "failed"]
    header = ["load", *counts, "requests/s", "tokens/s", *latencies, *extras]
    lines = [
        [
            loop.words,
            *(str(row[f"num_{name}"]) for name in counts),
            *(_number(row[name]) for name in rates),
            *("/".join(_number(row[f"{n}_{p}_s"], 1e3) for p in _PARTS) for n in _LATENCIES),
            *(_number(row[name]) for name in extras.values()),
        ]
        for loop, row in zip(chosen, rows, strict=True)
    ]
    return f"times in ms\n{table(header, lines)}"


def _number(value: float | None, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    scaled = scale * value
    return f"{scaled:,.0f}" if scaled >= 1000 else f"{scaled:.3g}"

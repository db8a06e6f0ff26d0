"""`jaxserve simulate`: the scheduler in virtual time, for chips that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from jaxserve.cli.base import Decorated, SectionOption, Verb, log_option
from jaxserve.cli.load import bound_options
from jaxserve.cli.options import engine_options
from jaxserve.cli.tables import sections, table
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from scheduler.step_time import StepCost
    from scheduler.summary import Bounds
    from scheduler.trace import Arrival, Arrivals

_WITHOUT = (
    "model",
    "load_format",
    "tokenizer",
    "chat_template",
    "dtype",
    "quantization",
    "warm_up",
    "deterministic",
    "max_logprobs",
    "device",
    "attention_backend",
    "cpu_kernels",
    "kernel_table",
    "seed",
    "preemption",
    "swap_space_gib",
    "cache_dir",
    "compilation_cache_dir",
)
"""Fields that mean nothing without a device or a tokenizer."""
_ARRIVALS = ("at-once", "poisson", "gamma", "closed-loop")


def _load(*flags: str, **settings: Any) -> Callable[[Decorated], Decorated]:
    return click.option(*flags, cls=SectionOption, section="Load options", **settings)


def _cost(*flags: str, **settings: Any) -> Callable[[Decorated], Decorated]:
    return click.option(*flags, cls=SectionOption, section="Device options", **settings)


_POSITIVE = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0)


@click.command("simulate", cls=Verb)
@_load("--arrivals", type=click.Choice(_ARRIVALS), default="at-once", help="How requests come.")
@_load("--num-requests", type=_POSITIVE, default=256, help="Requests to invent.")
@_load("--prompt-tokens", default="128", metavar="LENGTH", help="100, 80-120 or 20-2000:1.2.")
@_load(
    "--output-tokens",
    default="128",
    metavar="LENGTH",
    help="So many, uniform from a range, or with a heavy tail (Pareto, with that exponent).",
)
@_load("--request-rate", type=click.FloatRange(0, min_open=True), default=1.0, help="Per second.")
@_load(
    "--burstiness",
    type=click.FloatRange(0, min_open=True),
    default=2.0,
    help="Of gamma: standard deviation of the gaps over their mean; 1 is poisson.",
)
@_load("--num-users", type=_POSITIVE, default=16, help="Of closed-loop.")
@_load("--think-ms", type=_SECONDS, default=0.0, help="Of closed-loop: from answer to request.")
@_load("--load-seed", type=int, default=0, help="Of times and lengths.")
@_load(
    "--trace",
    metavar="FILE",
    help="JSON lines with time_s, num_prompt, num_output and, if they matter, token_ids, priority "
    "and key; instead of invented requests.",
)
@_load("--workload", metavar="FILE", help="As of bench throughput; all at once, to full length.")
@_cost("--chip", default="a100", help="Roofline of a chip in configs/chips, or a YAML file.")
@_cost("--model", default="7b", help="Sizes of a model in configs/models, or a YAML file.")
@_cost(
    "--step-table",
    metavar="FILE",
    help="Step times that `bench throughput --step-table` measured, instead of a roofline.",
)
@_cost("--overhead-us", type=_SECONDS, default=0.0, help="Of each step, beside the roofline.")
@_cost("--host-us", type=_SECONDS, default=0.0, help="Of the host in each turn of its loop.")
@bound_options(ttft_ms=None, tpot_ms=None)
@click.option("--json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--output", metavar="FILE", help="Write the JSON object here, too.")
@click.option("--steps", metavar="FILE", help="Write a JSON line per dispatch here.")
@log_option
@engine_options(without=_WITHOUT)
def command(
    bounds: Bounds,
    cost_per_hour: float | None,
    json: bool,
    output: str | None,
    steps: str | None,
    host_us: float,
    config: EngineConfig,
    **options: Any,
) -> None:
    """Serve a load in virtual time with the engine's own scheduler.

    The device is a model of step times: a roofline, which is a bound that no chip quite reaches,
    or a table that an engine measured.  Times are in seconds; what is unknown is null.
    """
    from jaxserve.bench.simulation import simulate_config
    from scheduler.summary import cost_per_million_tokens

    simulation = simulate_config(
        config,
        _arrivals(options),
        _step_cost(options, config),
        host_s=host_us / 1e6,
        bounds=_bounds(bounds, config),
        record_slots=steps is not None,
    )
    report = simulation.summary()
    rate = report["output_tokens_per_s"]
    report["cost_per_million_tokens"] = cost_per_million_tokens(cost_per_hour, rate)
    if steps is not None:
        lines = b"".join(msgspec.json.encode(line) + b"\n" for line in simulation.step_lines())
        Path(steps).write_bytes(lines)
    encoded = msgspec.json.encode(report)
    if output is not None:
        Path(output).write_bytes(encoded + b"\n")
    click.echo(encoded if json else _text(report))


def _bounds(bounds: Bounds, config: EngineConfig) -> Bounds:
    """What goodput counts: the bounds asked for, else those that the scheduler is to keep."""
    targets = (bounds.ttft_s, config.target_ttft_ms), (bounds.tpot_s, config.target_tpot_ms)
    ttft_s, tpot_s = (
        target_ms / 1e3 if bound is None and target_ms is not None else bound
        for bound, target_ms in targets
    )
    return replace(bounds, ttft_s=ttft_s, tpot_s=tpot_s)


def _arrivals(options: Mapping[str, Any]) -> Arrivals | list[Arrival]:
    from jaxserve.bench.simulation import workload_arrivals
    from scheduler import trace

    if options["trace"] is not None and options["workload"] is not None:
        raise click.UsageError("Give one of --trace and --workload.")
    if options["trace"] is not None:
        return trace.read_jsonl(options["trace"])
    if options["workload"] is not None:
        return workload_arrivals(options["workload"])
    count, rate, kind = options["num_requests"], options["request_rate"], options["arrivals"]
    lengths: dict[str, Any] = {
        "prompt": trace.parse_length(options["prompt_tokens"]),
        "output": trace.parse_length(options["output_tokens"]),
        "seed": options["load_seed"],
    }
    if kind == "poisson":
        return trace.poisson(count, rate, **lengths)
    if kind == "gamma":
        return trace.gamma(count, rate, cv=options["burstiness"], **lengths)
    if kind == "closed-loop":
        think_s = options["think_ms"] / 1e3
        return trace.ClosedLoop(count, options["num_users"], think_s=think_s, **lengths)
    return trace.at_once(count, **lengths)


def _step_cost(options: Mapping[str, Any], config: EngineConfig) -> StepCost:
    from jaxserve.bench.simulation import make_roofline
    from jaxserve.bench.step_table import read_table

    if options["step_table"] is not None:
        return read_table(options["step_table"])
    return make_roofline(
        options["chip"],
        options["model"],
        num_chips=config.tensor_parallel_size,
        kv_cache_dtype=config.kv_cache_dtype,
        overhead_s=options["overhead_us"] / 1e6,
    )


_LATENCIES = ("ttft", "tpot", "itl", "e2e")
_PARTS = ("mean", "p50", "p90", "p99")


def _text(report: Mapping[str, Any]) -> str:
    spreads = {f"{name}_{part}_s" for name in _LATENCIES for part in _PARTS}
    rest = {name: value for name, value in report.items() if name not in spreads}
    rows = [
        (name.upper(), *(_ms(report[f"{name}_{part}_s"]) for part in _PARTS)) for name in _LATENCIES
    ]
    header = ("ms", *(part.replace("p", "P") for part in _PARTS))
    return "\n".join([sections(rest), "", table(header, rows)])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.4g}"

"""The trade-off between throughput and latency: one load at several maximum batch sizes.

Knows engines.  `sweep_simulated` makes the same rows without one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxserve.bench.load import Load
from jaxserve.bench.report import make_report
from jaxserve.config import EngineConfig
from jaxserve.drive import take_finished
from jaxserve.outputs import RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams
from scheduler.simulation import KVUse
from scheduler.summary import Bounds, cost_per_million_tokens, goodput, spread
from scheduler.trace import Arrival

if TYPE_CHECKING:
    from jaxserve.llm import LLM

BATCH_SIZES = (1, 4, 8, 16, 32)


def with_slots(config: EngineConfig, num_slots: int) -> EngineConfig:
    """The configuration with so many slots, and no decode bucket beyond them."""
    buckets = config.batch_buckets
    if buckets is not None:
        buckets = (*(rows for rows in buckets if rows < num_slots), num_slots)
    return replace(config, max_num_seqs=num_slots, batch_buckets=buckets)


def sweep(
    make_llm: Callable[[EngineConfig], LLM],
    config: EngineConfig,
    make_load: Callable[[LLM], Load],
    batch_sizes: Iterable[int],
    *,
    bounds: Bounds,
    cost_per_hour: float | None = None,
    ignore_eos: bool = False,
) -> Iterator[dict[str, Any]]:
    """Serve the load with an engine per batch size; a row of figures as each is done.

    Each size has an engine of its own, since one with more slots pads to other buckets.

    Args:
        make_llm: gives an engine, which is closed after its run.
        config: of all of them but for the slots.
        make_load: the load, by the model's vocabulary and tokenizer.
        batch_sizes: slots of each.
        bounds: what goodput counts.
        cost_per_hour: of the machine, in any currency.
        ignore_eos: generate all tokens asked for, whatever the model says.
    """
    for num_slots in batch_sizes:
        with closing(make_llm(with_slots(config, num_slots))) as llm:
            row = measure_load(
                llm,
                make_load(llm),
                bounds=bounds,
                cost_per_hour=cost_per_hour,
                ignore_eos=ignore_eos,
            )
        del llm
        gc.collect()  # its cache must be gone before the next one's is there
        yield row


def measure_load(
    llm: LLM,
    load: Load,
    *,
    bounds: Bounds,
    cost_per_hour: float | None = None,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    """Serve a load and report its figures under the names of `make_report` and the simulator.

    Args:
        llm: its engine must be idle; its counters are reset.
        load: what to submit, and when.
        bounds: what goodput counts.
        cost_per_hour: of the machine, in any currency.
        ignore_eos: generate all tokens asked for, whatever the model says.

    Raises:
        ValueError: a request does not fit the model.
    """
    llm.engine.reset_stats()
    kv = KVUse()
    start = time.monotonic()
    outputs = _serve(llm, load, ignore_eos, kv)
    report = make_report(outputs, time.monotonic() - start, llm.engine.stats())
    return {
        "max_num_seqs": llm.config.max_num_seqs,
        **report,
        **_request_figures([output.metrics for output in outputs], report["wall_s"], bounds),
        **kv.waste(),
        "cost_per_million_tokens": cost_per_million_tokens(
            cost_per_hour, report["output_tokens_per_s"]
        ),
    }


def _request_figures(
    metrics: Sequence[RequestMetrics], wall_s: float, bounds: Bounds
) -> dict[str, float | None]:
    return {
        "requests_per_s": len(metrics) / wall_s if wall_s else None,
        **spread("ttft", [m.ttft for m in metrics if m.ttft is not None]),
        **spread("tpot", [m.tpot for m in metrics if m.tpot is not None]),
        **spread("itl", [gap for m in metrics for gap in m.itl]),
        **spread("e2e", [m.e2e for m in metrics if m.e2e is not None]),
        **goodput(bounds, [(m.ttft, m.tpot) for m in metrics], wall_s),
    }


def _serve(llm: LLM, load: Load, ignore_eos: bool, kv: KVUse) -> list[RequestOutput]:
    """Submit requests as they arrive and step until the last one has ended."""
    engine = llm.engine
    source = load.source(llm.config.max_num_seqs)
    running: dict[str, Arrival] = {}
    late_s: dict[str, float] = {}
    outputs: list[RequestOutput] = []
    start = time.monotonic()
    while True:
        for arrival in source.due(time.monotonic() - start):
            request_id = _submit(llm, arrival, len(late_s), ignore_eos)
            running[request_id] = arrival
            late_s[request_id] = time.monotonic() - start - arrival.time_s
        if engine.has_work:
            deltas = engine.step()
            kv.count(engine.scheduler, 1)
            for output in take_finished(engine, deltas):
                outputs.append(output)
                source.on_finish(running.pop(output.request_id), time.monotonic() - start)
            continue
        next_s = source.next_s()
        if next_s is None:
            break
        time.sleep(max(next_s - (time.monotonic() - start), 0.0))
    for output in outputs:
        _count_from_arrival(output.metrics, late_s[output.request_id])
    return outputs


def _submit(llm: LLM, arrival: Arrival, number: int, ignore_eos: bool) -> str:
    assert arrival.token_ids is not None
    params = SamplingParams(
        temperature=0, max_tokens=arrival.num_output, ignore_eos=ignore_eos, detokenize=False
    )
    try:
        return llm.engine.submit(list(arrival.token_ids), params)
    except ValueError as error:
        raise ValueError(f"request {number} of the load: {error}") from error


def _count_from_arrival(metrics: RequestMetrics, late_s: float) -> None:
    """A request that arrived during a step was submitted after it, but had waited from then on."""
    metrics.arrival_time -= late_s
    for name in ("queue_time", "ttft", "e2e"):
        if (value := getattr(metrics, name)) is not None:
            setattr(metrics, name, value + late_s)

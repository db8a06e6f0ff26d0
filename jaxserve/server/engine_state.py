"""What an engine holds at a moment, and the metrics that are made of it.

Read when somebody asks, not counted.  Does not know what happens between two moments:
`jaxserve.server.metrics` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from jaxserve.engine import Engine

PREFIX = "jaxserve:"
"""Of every metric's name."""


class EngineState(NamedTuple):
    """What an engine holds and has counted, at one moment."""

    num_running: int
    num_slots: int
    num_waiting: int
    num_pages: int
    """Pages that can be handed out, so without the null page."""
    num_pages_held: int
    num_pages_cached: int
    """Pages without an owner that are kept for their content."""
    page_size: int
    num_preemptions: int
    discarded_tokens: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_compilations: int
    """Compile events since the engine was ready."""


def engine_state(engine: Engine) -> EngineState:
    """Read an engine from any thread: single numbers only, nothing that needs a lock."""
    scheduler = engine.scheduler
    pool, stats = scheduler.pool, scheduler.stats
    return EngineState(
        num_running=scheduler.num_running,
        num_slots=scheduler.config.max_num_seqs,
        num_waiting=scheduler.num_waiting,
        num_pages=pool.num_pages - 1,
        num_pages_held=pool.num_held,
        num_pages_cached=pool.num_cached,
        page_size=pool.page_size,
        num_preemptions=stats.num_preemptions,
        discarded_tokens=stats.discarded_tokens,
        prefix_query_tokens=stats.prefix_query_tokens,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        num_compilations=engine.compilations.count,
    )


class StateCollector(Collector):
    """Metrics that are read from the engine when they are asked for."""

    def __init__(self, model_name: str, read: Callable[[], EngineState | None]) -> None:
        """Read nothing yet.

        Args:
            model_name: label of every metric.
            read: reads the engine; None while there is none.
        """
        self._model_name = model_name
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing: registering must not read an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One sample of each."""
        state = self._read()
        if state is None:
            return
        yield from self._gauges(state)
        for name, doc, value in (
            ("num_preemptions", "Times that a sequence yielded its pages.", state.num_preemptions),
            ("prefix_cache_queries", "Tokens looked up.", state.prefix_query_tokens),
            ("prefix_cache_hits", "Tokens found.", state.prefix_hit_tokens),
            ("discarded_tokens", "Tokens sampled after an end.", state.discarded_tokens),
            ("xla_compilations", "Compile events since ready.", state.num_compilations),
        ):
            counter = CounterMetricFamily(f"{PREFIX}{name}", doc, labels=("model_name",))
            counter.add_metric((self._model_name,), value)
            yield counter

    def _gauges(self, state: EngineState) -> Iterator[Metric]:
        for name, doc, value in (
            ("num_requests_running", "Sequences with a slot.", state.num_running),
            ("num_requests_waiting", "Sequences without a slot.", state.num_waiting),
            ("num_slots", "Most sequences at once.", state.num_slots),
            (
                "kv_cache_usage_perc",
                "Share of the KV pages that sequences hold; 1 is all.",
                state.num_pages_held / state.num_pages,
            ),
            (
                "kv_cache_cached_perc",
                "Share of the KV pages that are free, but kept for their content.",
                state.num_pages_cached / state.num_pages,
            ),
        ):
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", doc, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge
        info = GaugeMetricFamily(
            f"{PREFIX}cache_config_info",
            "Sizes of the KV cache.",
            labels=("model_name", "block_size", "num_gpu_blocks"),
        )
        info.add_metric((self._model_name, str(state.page_size), str(state.num_pages)), 1)
        yield info

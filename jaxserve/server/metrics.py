"""What a server counts: Prometheus metrics, and the figures of the status page.

Knows the engine's observer interface and how to read an engine's counts.  Does not know HTTP: a
server hands out `exposition()` and `snapshot()`.

Names are those of vLLM's metrics under the prefix "jaxserve:", so that a dashboard is carried over
by replacing the prefix.  `prometheus_client` appends "_total" to counters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from jaxserve.observer import Observer, StepRecord
from jaxserve.outputs import RequestMetrics, RequestOutput
from jaxserve.server.engine_state import PREFIX, EngineState, StateCollector, engine_state
from jaxserve.server.tally import Tally

if TYPE_CHECKING:
    from jaxserve.engine import Engine

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds to the first token."""
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Seconds between tokens."""
REQUEST_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Seconds of a request or of a part of it."""
STEP_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0),
)
"""Seconds of a step."""
TOKEN_BUCKETS = tuple(float(digit * 10**exponent) for exponent in range(6) for digit in (1, 2, 5))
"""Tokens of a request."""
ITERATION_BUCKETS = (1.0, *(float(2**power) for power in range(3, 15)))
"""Tokens of a step."""

_REASONS = ("stop", "length", "abort", "error")
"""Finish reasons; of a request with several samples the gravest counts, which is the last here."""


class Metrics(Observer):
    """Counts what an engine does, in a registry of its own.

    The engine's thread calls the `on_` methods; any thread may scrape.
    """

    def __init__(self, model_name: str, state: Callable[[], EngineState] | None = None) -> None:
        """Start at zero.

        Args:
            model_name: label of every metric of the engine.
            state: reads the engine; asked at every scrape.  `watch` sets it, too.
        """
        self.model_name = model_name
        self.registry = CollectorRegistry()
        self._state = state
        self._started = time.monotonic()
        self._shapes: dict[str, Histogram] = {}
        self._make_step_metrics()
        self._make_request_metrics()
        self._http = Counter(
            f"{PREFIX}http_requests",
            "HTTP responses.",
            ("method", "handler", "status"),
            registry=self.registry,
        )
        self.registry.register(StateCollector(model_name, self._read))
        ProcessCollector(registry=self.registry)

    def watch(self, engine: Engine) -> None:
        """Become the engine's observer and read its state at every scrape."""
        self._state = lambda: engine_state(engine)
        engine.observer = self

    @property
    def content_type(self) -> str:
        """Media type of the exposition."""
        return CONTENT_TYPE_LATEST

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)

    def count_response(self, method: str, handler: str, status: int) -> None:
        """Count an HTTP response.

        Args:
            method: such as "POST".
            handler: the route, not the path that was asked for: its values must be few.
            status: of the response.
        """
        self._http.labels(method, handler, str(status)).inc()

    def on_step(self, record: StepRecord) -> None:
        """Count a dispatch: its tokens, and what each of its steps took."""
        tokens = record.num_chunk_tokens + record.num_sampled
        self._prompt_tokens.inc(record.num_chunk_tokens)
        self._rows.inc(record.num_rows)
        self._used_rows.inc(tokens)
        if record.num_rows:
            self._padding.set(max(1 - tokens / record.num_rows, 0.0))
        device = self._shapes.get(record.shape) or self._step_time(record.shape)
        num_steps = record.num_steps
        for _ in range(num_steps):
            device.observe(record.device_s / num_steps)
            self._step_host.observe(record.host_s / num_steps)
            self._iteration_tokens.observe(tokens / num_steps)

    def on_tokens(self, ttfts: Sequence[float], gaps: Sequence[float]) -> None:
        """Count the tokens of a dispatch; first ones of further samples count at their end."""
        self._generation_tokens.inc(len(ttfts) + len(gaps))
        for ttft in ttfts:
            self._ttft.observe(ttft)
        self._itl.add(gaps)

    def on_end(self, output: RequestOutput) -> None:
        """Count a request by its end, and its times if it ended well."""
        num_begun = sum(bool(sample.token_ids) for sample in output.outputs)
        self._generation_tokens.inc(max(num_begun - 1, 0))
        reasons = [_REASONS.index(sample.finish_reason or "abort") for sample in output.outputs]
        reason = _REASONS[max(reasons)]
        self._ended[reason].inc()
        if reason in ("stop", "length"):
            self._request_prompt.observe(len(output.prompt_token_ids))
            self._request_generation.observe(sum(len(s.token_ids) for s in output.outputs))
            self._observe_times(output.metrics)

    def snapshot(self) -> dict[str, Any]:
        """The status page's figures, as plain data; times in seconds."""
        state = self._read()
        return {
            "model": self.model_name,
            "uptime_s": time.monotonic() - self._started,
            "slots": state and {"total": state.num_slots, "used": state.num_running},
            "pages": state
            and {
                "total": state.num_pages,
                "used": state.num_pages_held,
                "cached": state.num_pages_cached,
                "size": state.page_size,
            },
            "queue": state and state.num_waiting,
            "counters": self._counters(state),
            "ttft": _histogram(self._ttft),
            "itl": _histogram(self._itl),
            "e2e": _histogram(self._e2e),
            "steps": [
                _steps(shape, times) for shape, times in sorted(self._shapes.items(), key=_order)
            ],
            "host": _histogram(self._step_host),
            "compilations": state and state.num_compilations,
        }

    def _read(self) -> EngineState | None:
        return None if self._state is None else self._state()

    def _counters(self, state: EngineState | None) -> dict[str, Any]:
        return {
            "prompt_tokens": _value(self._prompt_tokens),
            "generation_tokens": _value(self._generation_tokens),
            "rows": _value(self._rows),
            "used_rows": _value(self._used_rows),
            "requests": {reason: _value(counter) for reason, counter in self._ended.items()},
            "preemptions": state and state.num_preemptions,
            "discarded_tokens": state and state.discarded_tokens,
            "prefix_query_tokens": state and state.prefix_query_tokens,
            "prefix_hit_tokens": state and state.prefix_hit_tokens,
        }

    def _observe_times(self, times: RequestMetrics) -> None:
        """A request without a token has no times but its queue's."""
        if times.queue_time is not None:
            self._queue.observe(times.queue_time)
        if times.e2e is None or times.ttft is None:
            return
        self._e2e.observe(times.e2e)
        self._prefill.observe(times.ttft - (times.queue_time or 0.0))
        self._decode.observe(times.e2e - times.ttft)
        if times.tpot is not None:
            self._tpot.observe(times.tpot)

    def _make_step_metrics(self) -> None:
        counter, histogram = self._counter, self._histogram
        self._prompt_tokens = counter(
            "prompt_tokens",
            "Prompt tokens computed, again after a preemption; not those of the prefix cache.",
        )
        self._generation_tokens = counter("generation_tokens", "Tokens generated.")
        self._rows = counter("model_rows", "Rows that the model computed, padding included.")
        self._used_rows = counter(
            "model_rows_used", "Rows that computed a prompt token or sampled one."
        )
        self._padding = Gauge(
            f"{PREFIX}batch_slots_padding_ratio",
            "Share of the newest step's rows that were padding.",
            ("model_name",),
            registry=self.registry,
        ).labels(self.model_name)
        self._step_times = Histogram(
            f"{PREFIX}step_time_seconds",
            "Time of a step on the device, by phase and compiled shape.",
            ("model_name", "phase", "bucket"),
            buckets=STEP_BUCKETS,
            registry=self.registry,
        )
        self._step_host = histogram(
            "step_host_time_seconds", "Time of a step on the host, beside the device.", STEP_BUCKETS
        )
        self._iteration_tokens = histogram(
            "iteration_tokens_total", "Tokens computed and sampled in a step.", ITERATION_BUCKETS
        )

    def _make_request_metrics(self) -> None:
        histogram = self._histogram
        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS)
        self._itl = Tally(
            f"{PREFIX}inter_token_latency_seconds",
            "Time between tokens; those of one dispatch come at once.",
            {"model_name": self.model_name},
            ITL_BUCKETS,
        )
        self.registry.register(self._itl)
        ended = Counter(
            f"{PREFIX}request_success",
            "Requests that ended, by the gravest finish reason of their samples.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._ended = {reason: ended.labels(self.model_name, reason) for reason in _REASONS}
        self._e2e = histogram("e2e_request_latency_seconds", "Time to last token.", REQUEST_BUCKETS)
        self._queue = histogram(
            "request_queue_time_seconds", "Time before the first admission.", REQUEST_BUCKETS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From admission to the first token.", REQUEST_BUCKETS
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", REQUEST_BUCKETS
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, of a request's first sample.",
            ITL_BUCKETS,
        )
        self._request_prompt = histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS
        )
        self._request_generation = histogram(
            "request_generation_tokens", "Tokens generated for a request.", TOKEN_BUCKETS
        )

    def _counter(self, name: str, doc: str) -> Counter:
        made = Counter(f"{PREFIX}{name}", doc, ("model_name",), registry=self.registry)
        return made.labels(self.model_name)

    def _histogram(self, name: str, doc: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(
            f"{PREFIX}{name}", doc, ("model_name",), buckets=buckets, registry=self.registry
        )
        return made.labels(self.model_name)

    def _step_time(self, shape: str) -> Histogram:
        """The histogram of a shape, when it is first seen."""
        phase = "decode" if shape.startswith("decode") else "mixed"
        # A new dict, so that a scrape that walks the old one is not disturbed.
        made = self._step_times.labels(self.model_name, phase, shape)
        self._shapes = {**self._shapes, shape: made}
        return made


def _samples(child: Counter | Histogram | Tally) -> Iterator[tuple[str, dict[str, str], float]]:
    for metric in child.collect():
        for sample in metric.samples:
            yield sample.name, sample.labels, sample.value


def _value(counter: Counter) -> float:
    return next(value for name, _, value in _samples(counter) if name.endswith("_total"))


def _histogram(child: Histogram | Tally) -> dict[str, Any]:
    """Upper bounds of the buckets, None for infinity, and how many values each has."""
    bounds: list[float | None] = []
    counts: list[float] = []
    total = below = 0.0
    for name, labels, value in _samples(child):
        if name.endswith("_bucket"):
            bound = float(labels["le"])
            bounds.append(None if bound == float("inf") else bound)
            counts.append(value - below)
            below = value
        elif name.endswith("_sum"):
            total = value
    return {"bounds": bounds, "counts": counts, "sum": total, "count": below}


def _order(item: tuple[str, Histogram]) -> tuple[str, list[int]]:
    """Shapes by kind and then by size, so that decode8 comes before decode16."""
    kind, *sizes = re.split(r"(\d+)", item[0])
    return kind, [int(size) for size in sizes[::2]]


def _steps(shape: str, times: Histogram) -> dict[str, Any]:
    found = _histogram(times)
    mean_s = found["sum"] / found["count"] if found["count"] else None
    return {"shape": shape, "count": found["count"], "mean_s": mean_s}

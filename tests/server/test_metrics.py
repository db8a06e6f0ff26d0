"""What is counted is what happened, under the names that dashboards know."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.cli import main
from jaxserve.engine import Engine
from jaxserve.observer import StepRecord
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.engine_state import PREFIX, EngineState
from jaxserve.server.metrics import Metrics
from tests.engine.mini import Mini, drain, greedy, prompts
from tests.server.process import ServerProcess

STATE = EngineState(
    num_running=3,
    num_slots=8,
    num_waiting=2,
    num_pages=20,
    num_pages_held=5,
    num_pages_cached=4,
    page_size=16,
    num_preemptions=1,
    discarded_tokens=6,
    prefix_query_tokens=100,
    prefix_hit_tokens=40,
    num_compilations=0,
)
VLLM_NAMES = {
    "gauge": {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"},
    "counter": {
        *("prompt_tokens", "generation_tokens", "num_preemptions", "request_success"),
        *("prefix_cache_queries", "prefix_cache_hits"),
    },
    "histogram": {
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
        "iteration_tokens_total",
    },
}
OWN_NAMES = {
    "gauge": {"batch_slots_padding_ratio"},
    "counter": {"xla_compilations"},
    "histogram": {"step_time_seconds", "step_host_time_seconds"},
}


def values(metrics: Metrics) -> dict[str, float]:
    """Sample name to value, without the prefix, summed over labels."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found[sample.name.removeprefix(PREFIX)] += sample.value
    return dict(found)


def labelled(metrics: Metrics, name: str, label: str) -> dict[str, float]:
    """Values of a sample by one label."""
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
        if sample.name == f"{PREFIX}{name}"
    }


def ended(*reasons: str, num_tokens: int = 3, **times: float) -> RequestOutput:
    samples = [
        CompletionOutput(i, "", list(range(num_tokens)), None, None, reason)
        for i, reason in enumerate(reasons)
    ]
    metrics = RequestMetrics(arrival_time=0.0, **times)
    return RequestOutput("r", None, [1, 2], None, samples, True, metrics)


def test_names_and_kinds_are_those_of_the_dashboards() -> None:
    metrics = Metrics("m", lambda: STATE)
    kinds: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        kinds.setdefault(family.type, set()).add(family.name.removeprefix(PREFIX))
    for wanted in (VLLM_NAMES, OWN_NAMES):
        for kind, names in wanted.items():
            assert names <= kinds[kind]


def test_the_media_type_is_prometheus() -> None:
    assert Metrics("m").content_type.startswith("text/plain")


def test_the_engines_state_is_read_at_the_scrape() -> None:
    state = STATE
    metrics = Metrics("m", lambda: state)
    assert values(metrics)["num_requests_running"] == 3
    state = STATE._replace(num_running=7, num_compilations=2)
    found = values(metrics)
    assert found["num_requests_running"] == 7
    assert found["num_requests_waiting"] == 2
    assert found["kv_cache_usage_perc"] == 0.25
    assert found["kv_cache_cached_perc"] == 0.2
    assert found["prefix_cache_hits_total"] / found["prefix_cache_queries_total"] == 0.4
    assert found["xla_compilations_total"] == 2


def test_every_metric_of_the_engine_names_the_model() -> None:
    metrics = Metrics("the model", lambda: STATE)
    metrics.on_step(StepRecord("decode8", 1, 0.01, 0.001, 0, 8, 8, 8, 0))
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        if family.name.startswith(PREFIX) and "http" not in family.name:
            for sample in family.samples:
                assert sample.labels["model_name"] == "the model", sample.name


def test_before_an_engine_is_watched_there_is_no_state() -> None:
    metrics = Metrics("m")
    assert "num_requests_running" not in values(metrics)
    assert metrics.snapshot()["slots"] is None


def test_steps_of_a_dispatch_are_counted_one_by_one() -> None:
    metrics = Metrics("m")
    metrics.on_step(StepRecord("decode8", 4, 0.04, 0.008, 0, 20, 32, 5, 0))
    metrics.on_step(StepRecord("mixed8x64", 1, 0.05, 0.004, 30, 6, 72, 5, 0))
    found = values(metrics)
    assert found["step_time_seconds_count"] == 5
    assert found["step_time_seconds_sum"] == pytest.approx(0.09)
    assert found["step_host_time_seconds_sum"] == pytest.approx(0.012)
    assert found["iteration_tokens_total_sum"] == 56
    assert found["prompt_tokens_total"] == 30
    assert found["batch_slots_padding_ratio"] == 0.5
    assert labelled(metrics, "step_time_seconds_count", "bucket") == {"decode8": 4, "mixed8x64": 1}
    assert labelled(metrics, "step_time_seconds_count", "phase") == {"decode": 4, "mixed": 1}


def test_a_dispatch_in_which_nothing_ran_is_no_step() -> None:
    metrics = Metrics("m")
    metrics.on_step(StepRecord("decode8", 0, 0.001, 0.001, 0, 0, 0, 0, 0))
    assert values(metrics)["step_host_time_seconds_count"] == 0


def test_the_gravest_reason_of_the_samples_counts() -> None:
    metrics = Metrics("m")
    for reasons in (["stop"], ["stop", "length"], ["abort", "stop"], ["length", "error", "abort"]):
        metrics.on_end(ended(*reasons))
    assert labelled(metrics, "request_success_total", "finished_reason") == {
        "stop": 1,
        "length": 1,
        "abort": 1,
        "error": 1,
    }


def test_times_are_of_requests_that_ended_well() -> None:
    metrics = Metrics("m")
    metrics.on_end(ended("stop", queue_time=0.5, ttft=2.0, e2e=6.0))
    metrics.on_end(ended("abort", queue_time=0.5, ttft=2.0, e2e=600.0))
    found = values(metrics)
    assert found["e2e_request_latency_seconds_sum"] == 6
    assert found["request_queue_time_seconds_sum"] == 0.5
    assert found["request_prefill_time_seconds_sum"] == 1.5
    assert found["request_decode_time_seconds_sum"] == 4
    assert found["request_generation_tokens_sum"] == 3


def test_a_request_without_a_token_has_no_latency() -> None:
    metrics = Metrics("m")
    metrics.on_end(ended("length", num_tokens=0, queue_time=0.5, e2e=1.0))
    found = values(metrics)
    assert found["request_queue_time_seconds_count"] == 1
    assert found["e2e_request_latency_seconds_count"] == 0
    assert found["generation_tokens_total"] == 0


def test_responses_are_counted_by_route_and_status() -> None:
    metrics = Metrics("m")
    for status in (200, 200, 429):
        metrics.count_response("POST", "/v1/completions", status)
    by_status = labelled(metrics, "http_requests_total", "status")
    assert by_status == {"200": 2, "429": 1}


@pytest.fixture(scope="module")
def mini(request: pytest.FixtureRequest) -> Mini:
    cache = request.config.cache
    assert cache is not None
    return Mini.build(Path(cache.mkdir("executables")))


class TestServer:
    """Over HTTP, while other tests may have used the server before."""

    @staticmethod
    def scraped(client: httpx.Client) -> dict[str, float]:
        reply = client.get("/metrics")
        assert reply.status_code == 200
        families = text_string_to_metric_families(reply.text)
        found: Counter[str] = Counter()
        for family in families:
            for sample in family.samples:
                found[sample.name.removeprefix(PREFIX)] += sample.value
        return dict(found)

    @pytest.mark.parametrize("endpoint", ["completions", "chat"])
    def test_a_load_is_counted_as_its_clients_see_it(
        self, server: ServerProcess, client: httpx.Client, endpoint: str
    ) -> None:
        before = self.scraped(client)
        flags = ["--endpoint", endpoint, "--num-prompts", "9", "--prompt-tokens", "12"]
        flags += ["--output-tokens", "10", "--prefix-tokens", "20", "--concurrency", "1,4"]
        command = ["bench", "serve", "--json", "--url", server.url, "--num-warmups", "0", *flags]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
        rows = json.loads(result.stdout)["rows"]
        assert [row["num_answered"] for row in rows] == [9, 9]
        after = self.scraped(client)
        counted = {name: after[name] - before.get(name, 0) for name in after}
        seen = {
            name: sum(row[f"{name}_tokens"] for row in rows)
            for name in ("prompt", "cached", "output")
        }
        assert counted["request_success_total"] == 18
        assert counted["generation_tokens_total"] == seen["output"]
        assert counted["request_prompt_tokens_sum"] == seen["prompt"]
        assert counted["prefix_cache_hits_total"] == seen["cached"] > 0
        assert counted["prompt_tokens_total"] == seen["prompt"] - seen["cached"]
        assert counted["xla_compilations_total"] == 0

    def test_the_status_is_what_the_page_reads(self, client: httpx.Client) -> None:
        status = client.get("/server_status").json()
        assert status["slots"]["total"] == 8
        assert Metrics("m").snapshot().keys() <= status.keys()
        page = client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "server_status" in page.text


class TestEngine:
    """Against a real engine."""

    @pytest.fixture
    def engine(self, mini: Mini) -> Engine:
        return mini.engine(multi_step=4, slots=4)

    @pytest.fixture
    def metrics(self, engine: Engine) -> Iterator[Metrics]:
        metrics = Metrics("mini")
        metrics.watch(engine)
        yield metrics
        engine.check()

    def test_tokens_are_counted_exactly(self, engine: Engine, metrics: Metrics) -> None:
        asks = [
            greedy(9),
            greedy(1),
            SamplingParams(max_tokens=7, n=3, seed=1, ignore_eos=True),
            SamplingParams(max_tokens=20, temperature=1.5, seed=10, stop=["a", "e", "1"], n=2),
        ]
        lengths = [5, 17, 9, 12]
        ids = [
            engine.submit(prompt, params)
            for prompt, params in zip(prompts(lengths), asks, strict=True)
        ]
        drain(engine)
        outputs = [engine.take(request_id) for request_id in ids]
        total = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        found = values(metrics)
        stats = engine.stats()
        assert found["generation_tokens_total"] == total == stats.output_tokens
        assert found["request_generation_tokens_sum"] == total
        assert found["request_prompt_tokens_sum"] == sum(lengths)
        computed = found["prompt_tokens_total"] + found["prefix_cache_hits_total"]
        assert computed == lengths[0] + lengths[1] + 3 * lengths[2] + 2 * lengths[3]
        assert found["time_to_first_token_seconds_count"] == len(asks)
        assert found["inter_token_latency_seconds_count"] == total - 7  # the samples' first ones
        assert sum(labelled(metrics, "request_success_total", "finished_reason").values()) == 4

    def test_steps_agree_with_the_engines_own_count(self, engine: Engine, metrics: Metrics) -> None:
        for prompt in prompts([30, 8, 41]):
            engine.submit(prompt, greedy(13))
        drain(engine)
        stats = engine.stats()
        by_shape = labelled(metrics, "step_time_seconds_count", "bucket")
        assert by_shape == stats.steps_by_shape
        assert values(metrics)["iteration_tokens_total_count"] == stats.steps

    def test_an_abort_is_counted_and_its_pages_come_back(
        self, engine: Engine, metrics: Metrics
    ) -> None:
        request_id = engine.submit(prompts([20])[0], greedy(100))
        engine.step()
        assert metrics.snapshot()["slots"] == {"total": 4, "used": 1}
        held = metrics.snapshot()["pages"]["used"]
        assert held > 0
        engine.abort(request_id)
        drain(engine)
        snapshot = metrics.snapshot()
        assert snapshot["slots"]["used"] == snapshot["pages"]["used"] == snapshot["queue"] == 0
        assert snapshot["counters"]["requests"]["abort"] == 1

    def test_a_preemption_is_counted(self, mini: Mini) -> None:
        engine = mini.engine(pages=12, slots=4)
        metrics = Metrics("mini")
        metrics.watch(engine)
        for prompt in prompts([8, 8, 8, 8]):
            engine.submit(prompt, greedy(40))
        drain(engine)
        found = values(metrics)
        assert found["num_preemptions_total"] == engine.stats().preemptions > 0

    def test_a_snapshot_is_json_and_agrees_with_the_exposition(
        self, engine: Engine, metrics: Metrics
    ) -> None:
        for prompt in prompts([6, 7]):
            engine.submit(prompt, greedy(6))
        drain(engine)
        snapshot = json.loads(json.dumps(metrics.snapshot(), allow_nan=False))
        found = values(metrics)
        for name, key in (
            ("ttft", "time_to_first_token_seconds"),
            ("itl", "inter_token_latency_seconds"),
            ("e2e", "e2e_request_latency_seconds"),
        ):
            histogram = snapshot[name]
            assert sum(histogram["counts"]) == histogram["count"] == found[f"{key}_count"]
            assert histogram["sum"] == pytest.approx(found[f"{key}_sum"])
            assert histogram["bounds"][-1] is None
            assert sorted(histogram["bounds"][:-1]) == histogram["bounds"][:-1]
        assert {step["shape"] for step in snapshot["steps"]} == set(engine.stats().steps_by_shape)
        assert snapshot["counters"]["generation_tokens"] == found["generation_tokens_total"]

    def test_scrapes_do_not_disturb_a_running_engine(
        self, engine: Engine, metrics: Metrics
    ) -> None:
        stop, failures = threading.Event(), []

        def scrape() -> None:
            while not stop.is_set():
                try:
                    metrics.exposition()
                    metrics.snapshot()
                except Exception as error:  # any, as this is what must not happen
                    failures.append(error)

        thread = threading.Thread(target=scrape)
        thread.start()
        try:
            for prompt in prompts([10] * 8):
                engine.submit(prompt, greedy(30))
            drain(engine)
        finally:
            stop.set()
            thread.join()
        assert failures == []
        assert values(metrics)["generation_tokens_total"] == 8 * 30

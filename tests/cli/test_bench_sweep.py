"""`jaxserve bench sweep`: loads, and rows measured or simulated.  Counts, never times."""

import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from jaxserve.bench import sweep
from jaxserve.bench.load import Users, make_load, synthetic
from jaxserve.bench.sweep_simulated import Machine
from jaxserve.bench.throughput import WorkloadRequest
from jaxserve.config import EngineConfig
from jaxserve.outputs import RequestMetrics
from jaxserve.plot.curve import LATENCIES
from scheduler.summary import Bounds
from tests.cli.fakes import FakeEngine, FakeLLM
from tests.cli.test_real_model import MODEL

REQUESTS = synthetic(12, 20, 10, 0.5, vocab_size=100, seed=1)


def test_synthetic_requests_have_the_lengths_asked_for():
    prompts = {len(request.prompt_token_ids) for request in REQUESTS}
    outputs = {request.max_tokens for request in REQUESTS}
    assert len(prompts) > 1
    assert len(outputs) > 1
    assert 10 <= min(prompts) <= max(prompts) <= 30
    assert 5 <= min(outputs) <= max(outputs) <= 15
    assert synthetic(12, 20, 10, 0.5, vocab_size=100, seed=1) == REQUESTS
    assert synthetic(12, 20, 10, 0.5, vocab_size=100, seed=2) != REQUESTS
    equal = synthetic(3, 7, 1, 0.0, vocab_size=9)
    assert {(len(r.prompt_token_ids), r.max_tokens) for r in equal} == {(7, 1)}


def test_arrivals_are_at_once_or_at_a_rate():
    assert {a.time_s for a in make_load(REQUESTS, None).arrivals} == {0.0}
    many = synthetic(2000, 2, 1, 0.0, vocab_size=9)
    times = [a.time_s for a in make_load(many, None, request_rate=50.0, seed=3).arrivals]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000 / 50, rel=0.1)  # 4 standard deviations
    with pytest.raises(ValueError, match="give one of the two"):
        make_load(REQUESTS, None, request_rate=1.0, closed_loop=True)


def test_texts_need_a_tokenizer():
    texts = [WorkloadRequest(prompt="ab", max_tokens=3)]
    (arrival,) = make_load(texts, lambda text: list(text.encode())).arrivals
    assert (arrival.token_ids, arrival.num_output) == ((97, 98), 3)
    with pytest.raises(ValueError, match="give prompt_token_ids"):
        make_load(texts, None)


def test_a_user_asks_when_he_is_answered():
    load = make_load(REQUESTS, None, closed_loop=True)
    users = load.source(5)
    assert isinstance(users, Users)
    first = users.due(0.0)
    assert [a.token_ids for a in first] == [a.token_ids for a in load.arrivals[:5]]
    assert users.due(1.0) == []
    users.on_finish(first[3], 2.0)
    (next_one,) = users.due(2.5)
    assert (next_one.time_s, next_one.token_ids) == (2.5, load.arrivals[5].token_ids)
    for arrival in (*first[:3], first[4], next_one):
        users.on_finish(arrival, 3.0)
    assert len(users.due(3.0)) == 5
    assert users.next_s() is None


def test_buckets_end_with_the_slots():
    config = EngineConfig(batch_buckets=(1, 8, 16), max_num_seqs=16)
    assert sweep.with_slots(config, 4).batch_buckets == (1, 4)
    assert sweep.with_slots(config, 32).batch_buckets == (1, 8, 16, 32)
    assert sweep.with_slots(EngineConfig(), 4) == EngineConfig(max_num_seqs=4)


def test_a_request_waits_from_its_arrival():
    metrics = RequestMetrics(arrival_time=10.0, queue_time=0.5, ttft=1.0, e2e=2.0)
    sweep._count_from_arrival(metrics, 0.25)
    assert (metrics.arrival_time, metrics.queue_time) == (9.75, 0.75)
    assert (metrics.ttft, metrics.e2e) == (1.25, 2.25)


class SweepEngine(FakeEngine):
    """A fake that knows what its sequences hold: 6 of 8 positions each, of at most 32."""

    def __init__(self, config):
        super().__init__(config)
        self.scheduler = self

    @property
    def running(self):
        count = min(sum(not r.finish_reason for r in self.samples()), self.config.max_num_seqs)
        return [SimpleNamespace(num_computed=6, block_table=[1, 2])] * count

    def samples(self):
        return [sample for request in self._requests.values() for sample in request.outputs]

    num_running = property(lambda self: len(self.running))
    pool = SimpleNamespace(page_size=4, num_held=0)

    def submit(self, ids, params):
        self.most_unfinished = max(
            getattr(self, "most_unfinished", 0),
            1 + sum(not sample.finish_reason for sample in self.samples()),
        )
        return super().submit(ids, params, prompt=repr(ids))


@pytest.fixture
def engines(fake_model, monkeypatch):
    """The fake models that were loaded; each must be closed before the next is made."""
    made = []

    class SweepLLM(FakeLLM):
        def __init__(self, *, config):
            assert all(llm.closed for llm in made)
            super().__init__(config=config)
            self.engine = SweepEngine(config)
            self.engine.config = self.config = config
            object.__setattr__(self.config, "max_model_len", 32)
            self.closed = False
            made.append(self)

        def close(self):
            self.closed = True

    monkeypatch.setitem(sys.modules, "jaxserve.llm", SimpleNamespace(LLM=SweepLLM))
    return made


SMALL = ("--num-prompts", 10, "--prompt-tokens", 5, "--output-tokens", 6)


def test_each_size_has_an_engine_of_its_own(jaxserve_cli, engines, tmp_path):
    out = tmp_path / "s.json"
    result = jaxserve_cli(
        "bench", "sweep", *SMALL, "--batch-sizes", "1,4,2", "--json", "--save-result", out
    )
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report == json.loads(result.stdout)
    assert [llm.config.max_num_seqs for llm in engines] == [1, 4, 2]
    assert [row["max_num_seqs"] for row in report["rows"]] == [1, 4, 2]
    assert len({tuple(llm.engine.submitted) for llm in engines}) == 1
    rows = report["rows"]
    assert {row["num_requests"] for row in rows} == {10}
    assert len({row["output_tokens"] for row in rows}) == 1
    steps = [row["steps"] for row in rows]
    assert steps[0] == rows[0]["output_tokens"]
    assert steps[0] > steps[2] > steps[1]
    for row in rows:
        assert row["kv_waste"] == pytest.approx(1 / 4)
        assert row["kv_waste_tokens_per_seq"] == pytest.approx(2)
        assert row["kv_waste_if_reserved"] == pytest.approx(1 - 6 / 32)
        assert row["goodput_requests_per_s"] is row["cost_per_million_tokens"] is None
        assert {f"{name}_s" for name in LATENCIES} <= row.keys()
        assert row["compilations_after_ready"] == 0


def test_bounds_and_price_add_columns(jaxserve_cli, engines, tmp_path):
    out = tmp_path / "s.json"
    arguments = ("--batch-sizes", "2", "--cost-per-hour", 3.6, "--save-result", out)
    shares = []
    for bound_ms in (10_000, 240):  # the fake's first token is there after 250 ms
        result = jaxserve_cli("bench", "sweep", *SMALL, *arguments, "--max-ttft-ms", bound_ms)
        assert result.exit_code == 0, result.output
        (row,) = json.loads(out.read_text())["rows"]
        shares.append(row["goodput_share"])
        rate = row["output_tokens_per_s"]
        assert row["cost_per_million_tokens"] == pytest.approx(3.6 / 3600 / rate * 1e6)
    assert shares == [1, 0]
    header, cells = result.stdout.splitlines()[1:]
    assert header.split()[:3] == ["batch", "tokens/s", "TTFT"]
    assert header.endswith("goodput/s  cost/M tokens")
    assert cells.split()[0] == "2"


def test_a_closed_loop_never_queues(jaxserve_cli, engines):
    jaxserve_cli("bench", "sweep", *SMALL, "--batch-sizes", "3,20")
    assert [llm.engine.most_unfinished for llm in engines] == [10, 10]
    result = jaxserve_cli("bench", "sweep", *SMALL, "--batch-sizes", "3,20", "--closed-loop")
    assert result.exit_code == 0, result.output
    assert [llm.engine.most_unfinished for llm in engines[2:]] == [3, 10]


def test_requests_at_a_rate_are_all_served(jaxserve_cli, engines, tmp_path):
    out = tmp_path / "s.json"
    rate = ("--request-rate", 2000, "--batch-sizes", "2", "--save-result", out)
    result = jaxserve_cli("bench", "sweep", *SMALL, *rate)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["num_requests"] == 10
    assert row["ttft_p50_s"] > 0.25  # what the fake says, and the wait for a step to end


def test_a_workload_file_is_the_load(jaxserve_cli, engines, tmp_path):
    workload = tmp_path / "w.json"
    requests = [{"prompt_token_ids": [1, 2], "max_tokens": 3}, {"prompt": "ab", "max_tokens": 4}]
    workload.write_text(json.dumps(requests))
    arguments = ("--workload", workload, "--batch-sizes", "2", "--json")
    result = jaxserve_cli("bench", "sweep", *arguments)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["prompt_tokens"], row["output_tokens"]) == (4, 7)
    result = jaxserve_cli("bench", "sweep", *arguments, "--simulate", "--chip", "a100")
    assert result.exit_code == 1
    assert "give prompt_token_ids" in result.stderr


def test_a_request_that_does_not_fit_is_named(jaxserve_cli, engines):
    result = jaxserve_cli("bench", "sweep", "--prompt-tokens", 500, "--num-prompts", 2)
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error")]
    assert "request 0 of the load" in line
    assert all(llm.closed for llm in engines)


CHIP = ("--simulate", "--chip", "a100", "--chip-model", "7b")


def test_a_chip_is_swept_without_a_model(jaxserve_cli, engines):
    arguments = ("--num-prompts", 64, "--prompt-tokens", 64, "--output-tokens", 64)
    result = jaxserve_cli("bench", "sweep", *CHIP, *arguments, "--json", "--cost-per-hour", 2)
    assert result.exit_code == 0, result.output
    assert not engines
    report = json.loads(result.stdout)
    assert report["simulated"] is True
    rows = report["rows"]
    assert [row["max_num_seqs"] for row in rows] == list(sweep.BATCH_SIZES)
    for before, after in itertools.pairwise(rows):
        assert after["output_tokens_per_s"] > before["output_tokens_per_s"]
        assert after["itl_mean_s"] > before["itl_mean_s"]
        assert after["cost_per_million_tokens"] < before["cost_per_million_tokens"]
    # 14 GB of weights at 2 TB/s are 7 ms, and a step cannot be faster.
    assert rows[0]["itl_p50_s"] == pytest.approx(7e-3, rel=0.05)
    text = jaxserve_cli("bench", "sweep", *CHIP, *arguments).stdout.splitlines()
    assert "simulated, roofline of 7b on a100" in text[0]
    assert [line.split()[0] for line in text[2:]] == ["1", "4", "8", "16", "32"]


def test_simulated_time_repeats(jaxserve_cli):
    arguments = (*CHIP, "--request-rate", 5, "--batch-sizes", "8", "--num-prompts", 20, "--json")
    first, second = (jaxserve_cli("bench", "sweep", *arguments).stdout for _ in range(2))
    assert first == second


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    from jaxserve.llm import LLM

    return LLM(
        str(MODEL),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=8,
        num_kv_blocks=65,
        batch_buckets=(4,),
        prefill_buckets=(32,),
        compilation_cache_dir=str(tmp_path_factory.mktemp("executables")),
    )


@pytest.mark.parametrize("closed_loop", [False, True])
def test_the_simulator_takes_the_steps_that_the_engine_took(llm, closed_loop):
    load = make_load(REQUESTS, None, closed_loop=closed_loop)
    llm.engine.scheduler.reset_prefix_cache()
    machine = Machine.measured(llm, load, ignore_eos=True)
    assert machine.cost.num_records > 0
    llm.engine.scheduler.reset_prefix_cache()
    measured = sweep.measure_load(llm, load, bounds=Bounds(), ignore_eos=True)
    simulated = machine.row(load, 4, bounds=Bounds())
    same = ("num_requests", "prompt_tokens", "output_tokens", "preemptions", "steps", "dispatches")
    same += ("slot_utilisation", "padded_share")
    for name in same:
        assert measured[name] == pytest.approx(simulated[name], rel=1e-12), name
    assert measured["kv_waste"] == pytest.approx(simulated["kv_waste"], abs=0.1)
    assert measured["compilations_after_ready"] == 0
    llm.engine.check()

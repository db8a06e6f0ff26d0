"""`jaxserve bench startup`: what it starts, what it reports, and one real pair of starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jaxserve.bench import startup
from jaxserve.bench.startup import COLUMNS, HEADER, PHASES, measure, rows, start_process
from jaxserve.config import EngineConfig

MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def fake_start(seconds: list[float]):
    """Stands in for a process; `fake.calls` is what was started."""

    def start(config, prompt):
        start.calls.append((config, prompt))
        value = seconds[len(start.calls) - 1]
        return dict.fromkeys(COLUMNS, value) | {"peak_rss_bytes": 1000 * value}

    start.calls = []
    return start


def test_second_starts_use_the_caches_of_the_configuration(model):
    config = EngineConfig(model=str(model), load_format="dummy")
    start = fake_start([9, 1, 5, 3])
    report = measure(config, "hello", 3, cold=False, start=start)
    assert start.calls == [(config, "hello")] * 4
    assert report["first_start"] is None
    assert [run["weights"] for run in report["second_starts"]] == [1, 5, 3]
    assert report["median"] == dict.fromkeys(COLUMNS, 3)
    assert report["peak_rss_bytes"] == 3000


def test_a_first_start_finds_only_the_model(model):
    config = EngineConfig(
        model=str(model), load_format="dummy", cache_dir="/mine", compilation_cache_dir="/mine/too"
    )
    start = fake_start([9, 1])
    report = measure(config, "hello", 1, cold=True, start=start)
    assert report["first_start"] == dict.fromkeys(COLUMNS, 9)
    used = {config for config, _ in start.calls}
    (used,) = used
    assert (used.model, used.load_format) == (str(model), "dummy")
    assert used.compilation_cache_dir is None
    assert used.cache_dir != "/mine"
    assert not os.path.exists(used.cache_dir)


def test_rows_are_the_phases_in_their_order():
    runs = [dict.fromkeys(COLUMNS, seconds) for seconds in (1.0, 4.0)]
    report = {"first_start": None, "second_starts": runs, "median": dict.fromkeys(COLUMNS, 2.5)}
    table = rows(report)
    assert [row[-1] for row in table] == [name.replace("_", " ") for name in COLUMNS]
    assert {tuple(row[:-1]) for row in table} == {("-", "2.50", "1.00", "4.00")}
    report["first_start"] = dict.fromkeys(COLUMNS, 60.0)
    assert {row[0] for row in rows(report)} == {"60.00"}
    assert len(HEADER) == len(table[0])


def test_a_real_process(model, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    config = EngineConfig(
        model=str(model),
        load_format="dummy",
        max_num_seqs=8,
        max_num_batched_tokens=32,
        batch_buckets=(8,),
        prefill_buckets=(16,),
        num_kv_blocks=4,
        cpu_kernels="off",
        cache_dir=str(tmp_path),
        warm_up=False,
    )
    run = start_process(config, "hello")
    assert run.keys() == {*COLUMNS, "peak_rss_bytes"}
    assert all(run[name] >= 0 for name in PHASES)
    assert sum(run[name] for name in PHASES) <= run["total"]
    assert run["peak_rss_bytes"] > 50e6


def test_what_a_process_says_when_it_fails_is_passed_on(tmp_path):
    with pytest.raises(
        ValueError, match=r"a start exited with 1: ValueError: model=.*no such file"
    ):
        start_process(EngineConfig(model=str(tmp_path / "none")), "hello")


def test_the_command_prints_a_table_or_json(jaxserve_cli, model, monkeypatch, tmp_path):
    monkeypatch.setattr(startup, "start_process", fake_start([1.0] * 100))
    arguments = ["bench", "startup", "--model", str(model), "--load-format", "dummy"]
    result = jaxserve_cli(*arguments, "--repeats", "2")
    assert result.output.splitlines()[0].split("  ")[-1] == "phase"
    assert "peak memory: 0.0 MiB" in result.output
    file = tmp_path / "report.json"
    result = jaxserve_cli(*arguments, "--json", "--output", str(file))
    report = json.loads(result.output)
    assert json.loads(file.read_text()) == report
    assert len(report["second_starts"]) == 5

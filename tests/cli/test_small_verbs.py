"""The verbs that print facts or move files: score, inspect, bench, collect-env, fetch, convert."""

import json

import pytest

import jaxserve.loading.convert
import jaxserve.loading.demo
from jaxserve.cli.tables import sections, table

NAMES_OF_THE_BENCH = [
    "output_tokens",
    "steps",
    "dispatches",
    "discarded_tokens",
    "output_tokens_per_s",
    "slot_utilisation",
    "padded_share",
    "preemptions",
    "swaps",
    "prefix_hit_tokens",
    "compilations_after_ready",
    "host_s_per_step",
    "step_s",
]


def test_score_json(jaxserve_cli):
    result = jaxserve_cli("score", "abc", "x", "--json")
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first["text"] == "abc"
    assert first["token_ids"] == [97, 98, 99]
    assert first["token_logprobs"] == [None, -0.5, -0.5]
    assert first["log_likelihood"] == -1.0
    assert first["mean_nll"] == 0.5
    assert first["perplexity"] == pytest.approx(1.6487, abs=1e-4)
    assert second["mean_nll"] is None


def test_score_table(jaxserve_cli):
    shown = jaxserve_cli("score", "abc", "y" * 100).stdout.splitlines()
    assert shown[0].split() == ["tokens", "log-likelihood", "mean", "NLL", "perplexity", "text"]
    assert shown[1].split() == ["3", "-1.000", "0.5000", "1.649", "abc"]
    assert shown[2].endswith("y…")


def test_score_of_token_ids(jaxserve_cli, tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"prompt_token_ids": [5, 6]}\n')
    record = json.loads(jaxserve_cli("score", "--prompt-file", file, "--json").stdout)
    assert record["text"] is None
    assert record["token_ids"] == [5, 6]


def test_inspect(jaxserve_cli):
    facts = json.loads(jaxserve_cli("inspect", "--json").stdout)
    assert facts["model"]["name"] == "fake"
    assert facts["model"]["num_kv_heads"] == 2
    assert facts["pages"] == 10
    shown = jaxserve_cli("inspect").stdout
    assert "kv_cache_bytes  3.0 MiB" in shown
    assert "8, 16" in shown


@pytest.fixture
def workload(tmp_path):
    file = tmp_path / "w.json"
    requests = [
        {"prompt": "a", "max_tokens": 5},
        {"prompt_token_ids": [1, 2], "max_tokens": 7},
        {"prompt_token_ids": [3], "max_tokens": 2},
    ]
    file.write_text(json.dumps(requests))
    return file


def test_bench_throughput(jaxserve_cli, workload, tmp_path):
    out = tmp_path / "r.json"
    result = jaxserve_cli(
        *("bench", "throughput", "--workload", workload, "--max-num-seqs", 16),
        *("--ignore-eos", "--json", "--output", out),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(out.read_text())
    assert set(NAMES_OF_THE_BENCH) <= report.keys()
    assert report["output_tokens"] == 14
    assert report["steps"] == 7
    assert report["prefix_hit_tokens"] is None


def test_bench_throughput_table_and_first_requests(jaxserve_cli, workload):
    shown = jaxserve_cli("bench", "throughput", "--workload", workload, "--num-prompts", 2).stdout
    assert dict(line.split(maxsplit=1) for line in shown.splitlines())["output_tokens"] == "12"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{}", ["not a workload"]),
        ("[", ["not a workload"]),
        ("[]", ["no requests"]),
        ('[{"prompt": "a"}]', ["max_tokens"]),
        ('[{"max_tokens": 5}]', ["request 0", "give one of"]),
        ('[{"prompt": "a", "max_tokens": 5, "seed": 1}]', ["seed"]),
        ('[{"prompt": "a", "max_tokens": 5}, {"prompt": "", "max_tokens": 5}]', ["request 1"]),
    ],
)
def test_bad_workload(jaxserve_cli, tmp_path, content, words):
    file = tmp_path / "w.json"
    file.write_text(content)
    result = jaxserve_cli("bench", "throughput", "--workload", file)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert all(word in line for word in words), line


def test_more_requests_than_there_are(jaxserve_cli, workload):
    result = jaxserve_cli("bench", "throughput", "--workload", workload, "--num-prompts", 4)
    assert "num_prompts=4" in result.stderr
    assert "3 requests" in result.stderr


def test_collect_env(jaxserve_cli):
    environment = {"JAXSERVE_SERVE_API_KEY": "hush", "JAXSERVE_X": "shown"}
    result = jaxserve_cli("collect-env", "--json", env=environment)
    facts = json.loads(result.stdout)
    assert facts["packages"]["jax"]
    assert facts["jax"]["devices"]
    assert facts["environment"]["JAXSERVE_X"] == "shown"
    assert "hush" not in result.stdout
    assert "jax" in jaxserve_cli("collect-env").stdout


def test_fetch_prints_the_path(jaxserve_cli, monkeypatch, tmp_path):
    monkeypatch.setattr(jaxserve.loading.demo, "fetch_demo_model", lambda cache: cache / "m.gguf")
    result = jaxserve_cli("fetch", "--cache-dir", tmp_path)
    assert result.stdout == f"{tmp_path / 'm.gguf'}\n"


def test_convert_passes_on_what_was_asked(jaxserve_cli, monkeypatch):
    asked = []
    monkeypatch.setattr(
        jaxserve.loading.convert, "convert", lambda *args, **kwargs: asked.append((args, kwargs))
    )
    result = jaxserve_cli("convert", "a.gguf", "new", "--to", "orbax", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert result.stdout == "new\n"
    assert asked == [
        (("a.gguf", "new", "orbax", "float32"), {"load_format": "auto", "cache_dir": None})
    ]


def test_convert_does_not_touch_what_exists(jaxserve_cli, tmp_path):
    (tmp_path / "mine").write_text("x")
    result = jaxserve_cli("convert", "src.gguf", tmp_path)
    assert result.exit_code == 1
    assert str(tmp_path) in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_tables():
    assert table(("n", "text"), [("10", "a"), ("2", "bb")]) == " n  text\n10  a\n 2  bb"
    shown = sections({"a": 1, "part": {"kv_bytes": 2**21, "none": None}, "list": [1, 0.5]})
    assert shown == "a     1\nlist  1, 0.5\npart\n  kv_bytes  2.0 MiB\n  none      -"

"""`jaxserve simulate`: loads, devices and reports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.bench.simulation import make_roofline
from scheduler.step_time import Buckets, FittedCost, StepWork

CONFIGS = Path(__file__).parents[2] / "configs"


def report(jaxserve_cli, *arguments):
    result = jaxserve_cli("simulate", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_roofline_run(jaxserve_cli):
    """32 sequences of 240 tokens on the A100: the published 9 ms a step."""
    figures = report(
        jaxserve_cli,
        *("--num-requests", 32, "--prompt-tokens", 239, "--output-tokens", 3),
        *("--max-num-batched-tokens", 8192, "--cost-per-hour", 2),
    )
    assert figures["num_requests"] == 32
    assert figures["steps"] == 3
    assert figures["itl_p50_s"] == pytest.approx(9e-3, rel=0.01)
    rate = figures["output_tokens_per_s"]
    assert rate == pytest.approx(96 / figures["wall_s"])
    assert figures["cost_per_million_tokens"] == pytest.approx(2 / 3600 / rate * 1e6)


def test_the_table_for_people(jaxserve_cli):
    shown = jaxserve_cli("simulate", "--num-requests", 4).stdout
    assert "slot_utilisation" in shown
    assert shown.splitlines()[-5].split() == ["ms", "mean", "P50", "P90", "P99"]
    assert [line.split()[0] for line in shown.splitlines()[-4:]] == ["TTFT", "TPOT", "ITL", "E2E"]


@pytest.mark.parametrize(
    "load",
    [
        ("--arrivals", "poisson", "--request-rate", 50),
        ("--arrivals", "gamma", "--request-rate", 50, "--burstiness", 4),
        ("--arrivals", "closed-loop", "--num-users", 3, "--think-ms", 5),
    ],
    ids=["poisson", "gamma", "closed-loop"],
)
def test_kinds_of_arrivals(jaxserve_cli, load):
    arguments = ("--num-requests", 20, "--prompt-tokens", "10-30", "--output-tokens", "5-90:1.1")
    figures = report(jaxserve_cli, *arguments, *load)
    assert figures["num_requests"] == 20
    assert figures == report(jaxserve_cli, *arguments, *load)
    assert figures["wall_s"] > 0.1


def test_policies_differ(jaxserve_cli):
    load = ("--num-requests", 64, "--output-tokens", "10-400:1.1", "--max-num-seqs", 8)
    steps = {
        name: report(jaxserve_cli, *load, "--batching", name)["steps"]
        for name in ("continuous", "static", "dynamic")
    }
    assert steps["continuous"] < steps["static"] == steps["dynamic"]


def test_bounds_and_goodput(jaxserve_cli):
    load = ("--num-requests", 32, "--max-num-seqs", 4)
    easy = report(jaxserve_cli, *load, "--max-ttft-ms", 60_000, "--max-tpot-ms", 1000)
    hard = report(jaxserve_cli, *load, "--max-ttft-ms", 100)
    assert easy["goodput_share"] == 1.0
    assert 0 < hard["goodput_share"] < 1
    assert report(jaxserve_cli, *load)["goodput_share"] is None
    assert report(jaxserve_cli, *load, "--target-tpot-ms", 8)["goodput_share"] is not None


def test_a_trace_and_its_steps(jaxserve_cli, tmp_path):
    trace, steps = tmp_path / "trace.jsonl", tmp_path / "steps.jsonl"
    trace.write_text('{"time_s": 1.5, "num_prompt": 9, "num_output": 3}\n')
    figures = report(jaxserve_cli, "--trace", trace, "--steps", steps, "--output", tmp_path / "o")
    assert figures == json.loads((tmp_path / "o").read_text())
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    assert [line["chunk_tokens"] for line in lines] == [9, 0, 0]
    assert lines[0]["start_s"] == 1.5
    assert lines[2]["slots"] == [[0, "request-1/0", "decode"]]


def test_a_workload(jaxserve_cli, tmp_path):
    file = tmp_path / "w.json"
    file.write_text('[{"prompt_token_ids": [1, 2], "max_tokens": 4}]')
    assert report(jaxserve_cli, "--workload", file)["output_tokens"] == 4
    file.write_text('[{"prompt": "a", "max_tokens": 4}]')
    result = jaxserve_cli("simulate", "--workload", file)
    assert result.exit_code == 1
    assert "request 0: the simulator has no tokenizer; give prompt_token_ids" in result.stderr


def test_a_measured_table(jaxserve_cli, tmp_path):
    cost = FittedCost(Buckets(rows=(1, 4), chunks=(64,)))
    for _ in range(10):
        cost.record(StepWork(rows=1, chunk_tokens=0, kv_tokens=9, num_seqs=1), 2e-3)
        cost.record(StepWork(rows=0, chunk_tokens=8, kv_tokens=8, num_seqs=1), 5e-3)
    file = tmp_path / "table.json"
    file.write_text(json.dumps(cost.to_dict()))
    load = ("--num-requests", 1, "--prompt-tokens", 8, "--output-tokens", 101)
    figures = report(jaxserve_cli, *load, "--step-table", file, "--max-num-seqs", 4)
    assert figures["ttft_p50_s"] == pytest.approx(5e-3, rel=1e-3)
    assert figures["itl_p50_s"] == pytest.approx(2e-3, rel=0.05)
    assert figures["padded_share"] == pytest.approx(1 - 108 / (4 + 64 + 100))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--chip", "z80"), 1, "no 'z80' in chips; known are a100, b200, h100, h200, v5e, v6e"),
        (("--model", "9b"), 1, "no '9b' in models; known are 70b, 7b, 8b"),
        (("--model", "70b"), 1, "do not fit 90% of the memory of 1 A100 (80 GB each)"),
        (("--trace", "a", "--workload", "b"), 2, "one of --trace and --workload"),
        (("--prompt-tokens", "x"), 1, "'x' is not a length"),
        (("--step-table", "/nowhere/at/all"), 1, "/nowhere/at/all"),
        (
            (
                "--max-model-len",
                8,
            ),
            1,
            "above max_model_len=8",
        ),
    ],
)
def test_bad_input_is_one_line(jaxserve_cli, arguments, code, message):
    result = jaxserve_cli("simulate", *arguments)
    assert result.exit_code == code
    assert message in result.stderr


def test_a_file_of_another_kind_is_no_table(jaxserve_cli, tmp_path):
    file = tmp_path / "table.json"
    file.write_text('{"wall_s": 1}')
    assert "not a table of step times" in jaxserve_cli("simulate", "--step-table", file).stderr


def test_a_file_with_an_unknown_key_is_no_chip(jaxserve_cli, tmp_path):
    file = tmp_path / "chip.yaml"
    file.write_text("name: x\nspeed: 3\n")
    message = jaxserve_cli("simulate", "--chip", file).stderr
    assert "unknown keys speed; known are bytes_per_s, flops_per_s, memory_bytes, name" in message


@pytest.mark.parametrize("chip", sorted(path.stem for path in (CONFIGS / "chips").iterdir()))
@pytest.mark.parametrize("model", sorted(path.stem for path in (CONFIGS / "models").iterdir()))
def test_shipped_chips_and_models(chip, model):
    """A decode step takes longer on a larger model, and reads its weights at least once."""
    roofline = make_roofline(chip, model, num_chips=16)
    step_s = roofline.seconds(StepWork(rows=1, chunk_tokens=0, kv_tokens=1, num_seqs=1))
    weights_s = roofline.model.weight_bytes / roofline.chip.bytes_per_s / 16
    assert step_s == pytest.approx(weights_s, rel=1e-3)
    assert roofline.num_kv_tokens() > 10_000


def test_eight_bit_pages_hold_more(jaxserve_cli):
    wide, narrow = make_roofline("h100", "8b"), make_roofline("h100", "8b", kv_cache_dtype="fp8")
    assert narrow.num_kv_tokens() == pytest.approx(
        wide.num_kv_tokens() * 2 / (1 + 4 / 128), rel=1e-3
    )


def test_simulate_does_not_import_jax():
    program = (
        "import sys; from jaxserve.cli import main; "
        "main(['simulate', '--num-requests', '2'], standalone_mode=False); "
        "print([m for m in ('jax', 'numpy', 'flax') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert run.stdout.splitlines()[-1] == "[]"

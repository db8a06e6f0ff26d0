"""The largest batch that keeps the bounds: the search, the profile, and `jaxserve tune`."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jaxserve.cli import main
from jaxserve.config import EngineConfig, load_profile
from jaxserve.tuning_batch import Choice, bounds_text, choose, keeps, profile
from scheduler.summary import Bounds
from tests.cli.test_real_model import MODEL

CONFIGS = Path(__file__).parents[2] / "configs"
BOUNDS = Bounds(ttft_s=0.5, tpot_s=0.1)
SIZES = (1, 2, 4, 8, 16)


def row(size, tpot_s, ttft_s=0.2):
    return {
        "max_num_seqs": size,
        "output_tokens_per_s": size / tpot_s,
        "ttft_p99_s": ttft_s,
        "tpot_p99_s": tpot_s,
    }


def machine(per_seq_s, runs=None):
    """TPOT grows with the batch; the sizes asked for are appended to `runs`."""

    def figures(size):
        if runs is not None:
            runs.append(size)
        return row(size, per_seq_s * size)

    return figures


def largest(per_seq_s):
    return max((size for size in SIZES if per_seq_s * size <= BOUNDS.tpot_s), default=None)


@pytest.mark.parametrize("predicted_s", [0.001, 0.007, 0.02, 0.04, 0.2])
@pytest.mark.parametrize("real_s", [0.001, 0.007, 0.02, 0.04, 0.09])
def test_runs_decide_whatever_was_predicted(predicted_s, real_s):
    runs = []
    choice = choose(SIZES, machine(predicted_s), machine(real_s, runs), BOUNDS)
    assert choice.batch_size == largest(real_s)
    assert len(runs) == len(set(runs)) == len(choice.measured)
    assert [r["max_num_seqs"] for r in choice.measured] == sorted(runs)
    assert [r["max_num_seqs"] for r in choice.predicted] == list(SIZES)
    assert choice.row == row(choice.batch_size, real_s * choice.batch_size)


def test_a_good_prediction_takes_two_runs():
    runs = []
    choose(SIZES, machine(0.02), machine(0.02, runs), BOUNDS)
    assert runs == [4, 8]


def test_without_runs_the_prediction_is_the_answer():
    choice = choose(SIZES, machine(0.02), None, BOUNDS)
    assert (choice.batch_size, choice.measured) == (4, ())
    assert choice.row["tpot_p99_s"] == 0.08


@pytest.mark.parametrize("measure", [None, machine(0.3)])
def test_if_no_size_will_do_the_smallest_says_why(measure):
    with pytest.raises(ValueError, match=r"even a batch of 1 has .*TPOT P99 300 ms.*TPOT < 100 ms"):
        choose(SIZES, machine(0.3), measure, BOUNDS)


def test_each_bound_counts_and_a_missing_one_does_not():
    assert keeps(row(1, 0.1, 0.5), BOUNDS)
    assert not keeps(row(1, 0.11, 0.5), BOUNDS)
    assert not keeps(row(1, 0.1, 0.51), BOUNDS)
    assert keeps(row(1, 9.0, 0.5), Bounds(ttft_s=0.5))
    assert keeps(row(1, 0.1, 9.0), Bounds(tpot_s=0.1))
    assert bounds_text(Bounds(tpot_s=0.1)) == "TPOT < 100 ms at P99"


def test_a_profile_has_what_differs_from_the_defaults(tmp_path):
    config = EngineConfig(model="m.gguf", max_num_seqs=3, batch_buckets=(1, 8, 16), dtype="float32")
    choice = Choice(4, (row(4, 0.05),), (row(4, 0.06),))
    path = tmp_path / "p.yaml"
    path.write_text(profile(config, choice, BOUNDS, "64 requests."))
    assert yaml.safe_load(path.read_text()) == {
        "model": "m.gguf",
        "dtype": "float32",
        "max-num-seqs": 4,
        "batch-buckets": [1, 4],
    }
    assert EngineConfig.from_mapping(load_profile(path)).max_num_seqs == 4
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert "TTFT < 500 ms and TPOT < 100 ms at P99" in comments[0]
    assert "TPOT P99 60 ms" in comments[2]


def test_a_profile_that_was_not_run_says_so():
    text = profile(EngineConfig(), Choice(4, (row(4, 0.05),)), BOUNDS, "")
    assert "# Simulated, not run" in text


SIMULATED = ("--simulate", "--chip", "a100", "--prompt-tokens", "64", "--output-tokens", "16")


def test_a_chip_is_tuned_without_a_model(jaxserve_cli, fake_model, tmp_path):
    out = tmp_path / "a100.yaml"
    result = jaxserve_cli("tune", *SIMULATED, "--num-prompts", 20, "-o", out)
    assert result.exit_code == 0, result.output
    assert not fake_model
    assert load_profile(out) == {"max_num_seqs": 64}
    assert "the largest batch with TTFT < 500 ms and TPOT < 100 ms at P99: 64" in result.stderr
    result = jaxserve_cli("score", "x", "--config", out)
    assert result.exit_code == 0, result.output
    assert fake_model[0].config.max_num_seqs == 64


def test_tighter_bounds_give_smaller_batches(jaxserve_cli):
    found = []
    for tpot_ms in (7.5, 12, 60):
        arguments = ("--num-prompts", 80, "--max-tpot-ms", tpot_ms, "--batch-sizes", "1,8,64")
        result = jaxserve_cli("tune", *SIMULATED, *arguments)
        assert result.exit_code == 0, result.output
        found.append(yaml.safe_load(result.stdout)["max-num-seqs"])
    assert found == sorted(found)
    assert found[0] < found[-1] == 64


def test_bounds_that_nothing_keeps_are_one_line(jaxserve_cli):
    result = jaxserve_cli("tune", *SIMULATED, "--max-tpot-ms", 1)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "even a batch of 1 has" in line
    assert "loosen the bounds" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chip", "a100"), "need --simulate"),
        (("--simulate", "--chip", "a100", "--step-table", "t"), "Give one of"),
        (("--batch-sizes", "0,1"), "must be positive"),
    ],
)
def test_wrong_usage(jaxserve_cli, arguments, words):
    result = jaxserve_cli("tune", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize(
    ("name", "least", "most"), [("latency", 1, 4), ("balanced", 8, 32), ("throughput", 64, 1024)]
)
def test_the_shipped_profiles_are_what_their_names_say(name, least, most):
    config = EngineConfig.from_mapping(load_profile(CONFIGS / f"{name}.yaml"))
    assert least <= config.max_num_seqs <= most


def test_a_real_engine_is_measured_predicted_and_run(tmp_path):
    out = tmp_path / "p.yaml"
    engine = {
        "model": MODEL,
        "dtype": "float32",
        "max-model-len": 64,
        "max-num-batched-tokens": 16,
        "block-size": 8,
        "num-kv-blocks": 33,
        "prefill-buckets": 16,
        "compilation-cache-dir": tmp_path,
    }
    flags = [str(part) for name, value in engine.items() for part in (f"--{name}", value)]
    load = ["--num-prompts", "6", "--prompt-tokens", "8", "--output-tokens", "4"]
    loose = ["--max-ttft-ms", "1e7", "--max-tpot-ms", "1e7", "--cost-per-hour", "1"]
    sizes = ["--batch-sizes", "2"]
    result = CliRunner().invoke(main, ["tune", *flags, *load, *loose, *sizes, "-o", str(out)])
    assert result.exit_code == 0, result.output
    config = EngineConfig.from_mapping(load_profile(out))
    assert (config.max_num_seqs, config.block_size, config.prefill_buckets) == (2, 8, (16,))
    assert "# Measured: " in out.read_text()
    simulated, measured = result.stderr.split("\nmeasured\n")
    for rows in (simulated.splitlines()[-2:], measured.splitlines()[:2]):
        assert [row.split()[0] for row in rows] == ["batch", "2"]
    assert "cost/M tokens" in measured

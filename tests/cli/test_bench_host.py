"""`jaxserve bench host`: the engine on a device that computes nothing.  Counts, never times."""

import json
from dataclasses import replace

import pytest

from jaxserve.bench import host


@pytest.mark.parametrize("multi_step", [1, 4])
@pytest.mark.parametrize("slots", [1, 5])
def test_a_steady_batch_is_split_into_phases(slots, multi_step):
    row = host.steady(slots, num_turns=3, step_s=0.0, multi_step=multi_step)
    assert (row["slots"], row["turns"], row["steps_per_turn"]) == (slots, 3, multi_step)
    parts = [row[f"{name}_s"] for name in ("schedule", "pack", "update", "output", "other")]
    assert all(part >= 0 for part in parts)
    assert row["total_s"] == pytest.approx(sum(parts))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_ragged_run_counts_what_the_device_did(asynchronous):
    one, four = (
        host.ragged(12, 4, 0.0, multi_step, asynchronous=asynchronous) for multi_step in (1, 4)
    )
    assert one["requests"] == four["requests"] == 12
    assert one["output_tokens"] == four["output_tokens"] > 12 * 8
    assert one["steps"] == one["dispatches"] == four["steps"]
    assert four["dispatches"] < four["steps"]


def test_the_device_knows_how_long_it_was_busy_and_idle():
    run = host.ragged(3, 2, 1e-4, 1)
    assert run["busy_s"] == pytest.approx(run["steps"] * 1e-4)
    assert 0 <= run["idle_share"] < 1
    assert run["idle_share"] == run["idle_s"] / (run["busy_s"] + run["idle_s"])


def test_a_dispatch_has_the_arrays_of_a_step():
    sizes = {"num_layers": 2, "vocab_size": 100, "sliding_windows": (None, None)}
    report = host.dispatch(3, num_calls=2, model=replace(host.SMOLLM2, **sizes))
    # Embedding and last norm, and per layer two norms and four matrices.
    assert report["weights"] == 2 + 2 * 6
    assert report["donated"] > 2 + 10
    assert report["calls"] == 2
    assert min(report["call_s"], report["thread_s"], report["put_s"]) > 0


@pytest.fixture
def measured(monkeypatch):
    """Without the program of the full size."""
    sizes = {"num_layers": 1, "vocab_size": 300, "sliding_windows": (None,)}
    small = replace(host.SMOLLM2, **sizes)
    monkeypatch.setattr(host, "SMOLLM2", small)
    dispatch = host.dispatch
    monkeypatch.setattr(host, "dispatch", lambda slots, calls: dispatch(slots, calls, small))


SMALL = ("--slots", "1,2", "--turns", 2, "--step-ms", 0, "--requests", 3)


def test_json(jaxserve_cli, measured, tmp_path):
    out = tmp_path / "r.json"
    result = jaxserve_cli("bench", "host", *SMALL, "--multi-step", 2, "--json", "--output", out)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(out.read_text())
    assert [row["slots"] for row in report["host"]] == [1, 2]
    assert report["multi_step"] == 2
    assert report["ragged"]["requests"] == 3
    assert report["dispatch"]["calls"] == 2


def test_table(jaxserve_cli, measured):
    result = jaxserve_cli("bench", "host", *SMALL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[1].split()[:6] == ["slots", "schedule", "pack", "update", "output", "other"]
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    assert "the device is idle" in lines[5]
    assert "donated arrays" in lines[6]


def test_slots_are_positive(jaxserve_cli):
    result = jaxserve_cli("bench", "host", "--slots", "0,2")
    assert result.exit_code == 2
    assert "--slots must be positive" in result.stderr

"""`jaxserve bench kernels`: bytes by the formula, times where they mean something, the tuner."""

import json
import logging

import numpy as np
import pytest

from jaxserve.bench.lengths import MIXES, make_lengths
from jaxserve.bench.roofline import SHAPES, Cell, Heads, floor_bytes, flops, split_bytes

TINY = ("--shape", "4,2,32", "--batch-size", 2, "--context", 64, "--page-size", 16)


@pytest.fixture
def bench(jaxserve_cli):
    return lambda *arguments: jaxserve_cli("bench", "kernels", *arguments)


def test_without_a_gpu_the_bytes_and_that_nothing_was_timed(bench, tmp_path):
    out = tmp_path / "r.json"
    result = bench(
        *("--roofline", "--batch-size", "32", "--context", 2048, "--mix", "uniform"),
        *("--page-size", 16, "--json", "--output", out),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(out.read_text())
    assert report["timed"] is False
    assert report["reason"] == "no GPU: not timed"
    half, byte = report["cells"]
    # 4 KiB per token and layer, and queries and results of 32 x 32 x 128.
    assert half["floor_bytes"] == 32 * 2048 * 4096 + 2 * 32 * 32 * 128 * 2
    assert byte["floor_bytes"] == 32 * 2048 * (2048 + 64) + 2 * 32 * 32 * 128 * 2
    shown = bench("--roofline", "--batch-size", "32", "--context", 2048, "--mix", "uniform").stdout
    assert "no GPU: not timed" in shown
    assert "269.0" in shown


def test_timed_anyway_every_operation_has_its_rates(bench):
    result = bench(
        *("--roofline", "--time-anyway", "--json", "--implementation", "xla", *TINY),
        *("--mix", "zipf", "--op", "decode,prefill,write", "--chunk", 32, "--kv-dtype", "int8"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["timed"] is True
    assert [cell["op"] for cell in report["cells"]] == ["decode", "prefill", "write"]
    for cell in report["cells"]:
        (found,) = cell["results"]
        if found["seconds"] is None:  # on a busy machine a chain may look no longer than nothing
            assert found["skipped"] == "too short to be measured"
            continue
        assert found["bytes_per_s"] == pytest.approx(cell["floor_bytes"] / found["seconds"])
        share = found["bytes_per_s"] / report["copy_bytes_per_s"]
        assert found["copy_share"] == pytest.approx(share)


def test_an_implementation_that_cannot_is_skipped_with_its_reason(bench):
    names = ("--implementation", "pallas_mgpu", "--mix", "uniform", "--kv-dtype", "bfloat16")
    result = bench("--roofline", "--time-anyway", *names, *TINY)
    assert result.exit_code == 0, result.output
    assert "pallas_mgpu: runs on gpu, not on cpu" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, ["one of --roofline and --tune"]),
        (("--roofline", "--tune", "t.json"), 2, ["one of --roofline and --tune"]),
        (("--tune", "t.json"), 1, ["needs a GPU", "cpu"]),
        (("--roofline", "--shape", "9b"), 2, ["'9b'", "smollm2-135m", "32,8,128"]),
        (("--roofline", "--shape", "9,2,64"), 2, ["9,2,64", "multiple"]),
        (("--roofline", "--mix", "normal"), 2, ["'normal'", "one-long"]),
        (("--roofline", "--op", "read"), 2, ["'read'", "prefill"]),
        (("--roofline", "--implementation", "cuda"), 1, ["'cuda'", "xla"]),
        (("--roofline", "--table", "no.json"), 1, ["no.json"]),
    ],
)
def test_wrong_usage(bench, arguments, code, words):
    result = bench(*arguments)
    assert result.exit_code == code, result.output
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize("mix", MIXES)
def test_lengths_of_a_mix(mix):
    lengths = make_lengths(mix, 32, 2048)
    assert len(lengths) == 32
    assert max(lengths) == 2048
    assert min(lengths) >= 1
    expected = {"uniform": 32 * 2048, "zipf": sum(2048 // i for i in range(1, 33))}
    assert sum(lengths) == expected.get(mix, 2048 + 31 * 32)


def test_flops_count_each_pair_of_query_and_key_once():
    heads = Heads(4, 2, 8)
    cell = Cell("prefill", 2, 50, "uniform", "bfloat16", 16, chunk=32)
    position = np.arange(50)
    pairs = 2 * (position[:, None] >= position)[-16:].sum()
    assert flops(cell, heads) == 2 * 2 * 4 * 8 * pairs
    assert flops(Cell("decode", 3, 50, "uniform", "int8", 16), heads) == 4 * 4 * 8 * 3 * 50


def test_bytes_of_writes_and_partials():
    heads = SHAPES["8b"]
    # A key and a value of 8 x 128, read as 16 bits and written as 8, and their scales.
    assert floor_bytes(Cell("write", 10, 1, "uniform", "int8", 16), heads) == 10 * (
        2 * 8 * 128 * (2 + 1) + 2 * 8 * 4
    )
    cell = Cell("decode", 32, 2048, "uniform", "bfloat16", 16)
    assert split_bytes(cell, heads, 256) == 2 * 8 * 32 * 32 * 130 * 4


def test_the_tuner_keeps_what_is_right_and_adds_to_its_table(tmp_path, caplog):
    from jaxserve.bench.tune import Grid, Tuner
    from pallas_kernels.tuned_table import Entry, Key, TunedTable

    path = tmp_path / "t.json"
    old = TunedTable({Key("x", "decode", 64, 1, 16, "int8"): Entry(1, 64, 256, 4, 3)})
    old.write(path)
    # A block of 24 keys is neither whole pages of 16 nor a part of one.
    grid = Grid(block_kv=(16, 24), num_warps=(4,), num_stages=(2,), chunk_kv=(64,))
    tuner = Tuner(Heads(4, 2, 32), path, grid, "xla", longest=64, batch=2)
    with caplog.at_level(logging.INFO):
        assert tuner.run(("decode",), ("bfloat16",), (16,)) == 1
    assert "block_kv=24 is neither a multiple nor a divisor" in caplog.text
    table = TunedTable.read(path)
    assert len(table.entries) == 2
    found = table.entries[Key("cpu", "decode", 32, 2, 16, "bfloat16")]
    assert (found.block_kv, found.chunk_kv) == (16, 64)
    assert found.microseconds > 0


def test_the_tuner_writes_no_wrong_kernel(tmp_path, monkeypatch):
    from jaxserve.bench import tune

    monkeypatch.setattr(tune, "relative_error", lambda got, want: float("nan"))
    grid = tune.Grid((16,), (4,), (2,), (64,))
    tuner = tune.Tuner(Heads(4, 2, 32), tmp_path / "t.json", grid, "xla", longest=64, batch=2)
    with pytest.raises(ValueError, match="relative error nan"):
        tuner.run(("decode",), ("bfloat16",), (16,))
    assert not list(tmp_path.iterdir())

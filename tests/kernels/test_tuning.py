"""Sizes of kernels: the defaults, and tables of measured ones that overrule them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.tuned_table import CELL_DTYPES, Entry, Key, TunedTable, file_name
from pallas_kernels.tuning import MAX_CHUNKS, Launch, Tuned, default, sizes

KEY = Key("NVIDIA H200", "decode", 128, 4, 16, "bfloat16")
ENTRY = Entry(1, 128, 512, 8, 4, microseconds=61.5)
H200 = ("gpu", "NVIDIA H200", 128, 4, 16, "bfloat16")
MAX_SHARED_BYTES = 227 << 10
"""Of a program on an H100 or H200."""


@pytest.mark.parametrize(
    ("platform", "page_size", "block_q", "block_kv"),
    [("cpu", 64, 64, 256), ("cpu", 24, 64, 240), ("tpu", 16, 128, 256), ("cpu", 512, 64, 512)],
)
def test_without_a_gpu_blocks_are_whole_pages(
    platform: str, page_size: int, block_q: int, block_kv: int
) -> None:
    found = sizes(platform, "any", 64, 3, page_size, "bfloat16", 2048, None)
    assert found.prefill == Tuned(block_q, block_kv, None)
    assert (found.decode.block_q, found.decode.block_kv) == (1, block_kv)


@given(
    head_dim=st.sampled_from([32, 64, 80, 128, 256]),
    group=st.integers(1, 128),
    page_size=st.sampled_from([16, 24, 32, 48, 64, 128]),
    cell_dtype=st.sampled_from(CELL_DTYPES),
    max_len=st.integers(1, 1 << 20),
    kind=st.sampled_from(["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]),
)
def test_defaults_fit_every_model(
    head_dim: int, group: int, page_size: int, cell_dtype: str, max_len: int, kind: str
) -> None:
    found = sizes("gpu", kind, head_dim, group, page_size, cell_dtype, max_len, None)
    decode, prefill = found.decode, found.prefill
    assert decode.chunk_kv is not None
    assert -(-max_len // decode.chunk_kv) <= MAX_CHUNKS
    assert decode.chunk_kv >= max(256, decode.block_kv)
    assert decode.block_q == 1
    assert prefill.chunk_kv is None
    assert prefill.block_q == 1 or prefill.block_q * group <= 128
    for tuned in (decode, prefill):
        assert tuned.block_kv % page_size == 0 or page_size % tuned.block_kv == 0
        width = {"float32": 4, "int8": 1, "float8_e4m3fn": 1}.get(cell_dtype, 2)
        in_flight = 2 * tuned.block_kv * head_dim * width * tuned.launch.num_stages
        assert in_flight <= MAX_SHARED_BYTES


def test_an_entry_wins_over_the_default_and_only_where_it_was_measured() -> None:
    table = TunedTable({KEY: ENTRY})
    found = sizes(*H200, 4096, table)
    assert found.decode == Tuned(1, 128, 512, Launch(8, 4))
    assert found.prefill == default("prefill", *H200[1:])
    for other in (
        ("gpu", "NVIDIA H100", 128, 4, 16, "bfloat16"),
        ("gpu", "NVIDIA H200", 64, 4, 16, "bfloat16"),
        ("gpu", "NVIDIA H200", 128, 8, 16, "bfloat16"),
        ("gpu", "NVIDIA H200", 128, 4, 32, "bfloat16"),
        ("gpu", "NVIDIA H200", 128, 4, 16, "int8"),
    ):
        assert sizes(*other, 4096, table) == sizes(*other, 4096, None)
    # A chunk that was measured still grows with the longest sequence.
    assert sizes(*H200, 1 << 17, table).decode.chunk_kv == 2048


def test_one_entry_serves_all_ratios_of_its_bucket() -> None:
    table = TunedTable({replace(KEY, op="prefill"): Entry(128, 64, None, 8, 3)})
    for group, block_q in ((4, 32), (3, 42)):
        call = ("gpu", "NVIDIA H200", 128, group, 16, "bfloat16")
        assert sizes(*call, 4096, table).prefill == Tuned(block_q, 64, None, Launch(8, 3))


def test_a_written_table_reads_the_same(tmp_path: Path) -> None:
    path = tmp_path / file_name("NVIDIA H200")
    assert path.name == "nvidia-h200.json"
    table = TunedTable({KEY: ENTRY}).with_entry(
        replace(KEY, op="prefill"), Entry(64, 64, None, 4, 3)
    )
    table.write(path)
    assert TunedTable.read(path) == table
    assert TunedTable.of_device(tmp_path, "NVIDIA H200") == table
    assert TunedTable.of_device(tmp_path, "NVIDIA L4") == TunedTable()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "write"}, ["op='write'", "decode, prefill"]),
        ({"head_dim": 0}, ["head_dim=0", "positive"]),
        ({"head_dim": True}, ["head_dim=True", "positive"]),
        ({"group": 3}, ["group=3", "power of two"]),
        ({"page_size": "16"}, ["page_size='16'", "positive"]),
        ({"cell_dtype": "int4"}, ["cell_dtype='int4'", "int8"]),
        ({"device_kind": ""}, ["device_kind=''"]),
        ({"block_kv": 48}, ["block_kv=48", "power of two"]),
        ({"chunk_kv": None}, ["chunk_kv=None", "power of two"]),
        ({"op": "prefill"}, ["chunk_kv=512", "null"]),
        ({"num_warps": 4.0}, ["num_warps=4.0"]),
        ({"num_stages": -1}, ["num_stages=-1"]),
        ({"microseconds": 0}, ["microseconds=0"]),
        ({"blocks": 4}, ["unknown key 'blocks'", "4"]),
    ],
)
def test_a_malformed_entry_is_named(
    tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    path = tmp_path / "t.json"
    record = {**vars(KEY), **vars(ENTRY)}
    path.write_text(json.dumps({"entries": [record, {**record, "page_size": 32, **change}]}))
    with pytest.raises(ValueError, match="entry 1") as error:
        TunedTable.read(path)
    for word in [str(path), *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"entries": {}}', '{"entries": [1]}'])
def test_a_file_that_is_no_table_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"t\.json"):
        TunedTable.read(path)


def test_missing_keys_and_doubled_entries_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    record = {**vars(KEY), **vars(ENTRY)}
    path.write_text(json.dumps({"entries": [record, record]}))
    with pytest.raises(ValueError, match="two entries for Key"):
        TunedTable.read(path)
    del record["num_warps"]
    path.write_text(json.dumps({"entries": [record]}))
    with pytest.raises(ValueError, match="'num_warps' is missing"):
        TunedTable.read(path)

"""`benchmarks/peers`: the same work for all, in turns, counted right and written without paths."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.peers import proc
from benchmarks.peers.command import main, write_pages
from benchmarks.peers.document import document, without_paths
from benchmarks.peers.engines import Engine, line_up, ours, peer
from benchmarks.peers.environments import NotInstalled, given_environment, last_line
from benchmarks.peers.labels import labels
from benchmarks.peers.machine import parse_choice, parse_cpuinfo
from benchmarks.peers.measure import Group, Results, Turn, tokens_per_s
from benchmarks.peers.models import requantize, share_of_8bit
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.peers.report import markdown, table
from benchmarks.peers.summary import agreement, first_difference, ratios, rows, spread
from benchmarks.peers.work import Item, Request, fixed_and_ragged, items, small_items

WORK_SHA256 = "98935c2d04471d5e53769335daed79a849616c92ce995ecb03a55355e53ddd16"
ROOT = Path(__file__).parents[1]


def turn(engine: str, repeat: int, rate: float, item: str = "ragged-8", **more: Any) -> dict:
    plain = {"seconds": 100 / rate, "first_s": None, "own_cores": 2.0, "quiet": True}
    named = {"engine": engine, "item": item, "repeat": repeat, "tokens_per_s": rate}
    return {**named, **plain, **more}


# Work.


def test_the_work_is_that_of_the_first_measurements() -> None:
    fixed, ragged = fixed_and_ragged()
    assert [len(fixed), len(ragged)] == [32, 64]
    assert {(len(r.prompt), r.max_tokens) for r in fixed} == {(128, 64)}
    assert sum(len(r.prompt) for r in ragged) == 8855
    assert sum(r.max_tokens for r in ragged) == 5936
    pairs = [[[r.prompt, r.max_tokens] for r in requests] for requests in (fixed, ragged)]
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    assert digest == WORK_SHA256


def test_items_that_share_an_engine_are_neighbours() -> None:
    found = [(item.name, item.engine_slots, len(item.requests)) for item in items((8, 1), (2, 16))]
    assert found == [
        ("fixed-1", 16, 1),
        ("fixed-8", 16, 8),
        ("ragged-16", 16, 64),
        ("ragged-2", 2, 64),
    ]
    assert sum(item.output_tokens for item in small_items()) < 2000


def test_decoding_is_timed_without_the_first_tokens() -> None:
    item = Item("fixed", 8, 32, (Request([1], 64),) * 8)
    assert tokens_per_s(item, 3.0, 1.0) == 8 * 63 / 2
    assert tokens_per_s(Item("ragged", 8, 8, item.requests), 4.0, None) == 8 * 64 / 4


# Numbers.


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0, 8.0]) == {"median": 2.5, "min": 1.0, "max": 8.0, "spread": 2.8}
    with pytest.raises(ValueError, match="no values"):
        spread([])


def test_rows_count_repeats_and_quiet_ones() -> None:
    found = rows([turn("a", 0, 10), turn("b", 0, 5), turn("a", 1, 30, quiet=False)])
    assert [(row["engine"], row["repeats"], row["quiet"]) for row in found] == [
        ("a", 2, 1),
        ("b", 1, 1),
    ]
    assert found[0]["tokens_per_s"]["median"] == 20
    assert found[0]["first_s"] is None


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    turns = [turn("a", i, rate) for i, rate in enumerate([10, 40, 90])]
    turns += [turn("b", i, rate) for i, rate in enumerate([10, 10, 60, 1])]
    (found,) = ratios(turns, [("a", "b"), ("a", "absent")])
    assert (found["item"], found["ours"], found["peer"]) == ("ragged-8", "a", "b")
    assert found["pairs"] == 3
    assert (found["median"], found["min"], found["max"]) == (1.5, 1.0, 4.0)


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 3], 1), ([], [], None)],
)
def test_first_difference(a: list[int], b: list[int], position: int | None) -> None:
    assert first_difference(a, b) == position


def test_nothing_is_compared_after_the_first_difference() -> None:
    found = agreement([[1, 2, 9, 4], [5, 6]], [[1, 2, 3, 4], [5, 6]])
    assert found == {
        "equal_share": 4 / 6,
        "equal_requests": 1,
        "requests": 2,
        "first_differences": [2],
    }


# Reading /proc.


def test_a_process_with_a_strange_name_is_read() -> None:
    fields = " ".join(str(n) for n in range(10))
    text = f"12 (a) (b c)) S 7 {fields[2:]} 100 20 3 4 20 0"
    found = proc.parse_stat(text)
    assert (found.pid, found.parent) == (12, 7)
    assert found.cpu_s == pytest.approx(127 / os.sysconf("SC_CLK_TCK"))


def test_busy_time_has_no_idle_time_and_counts_no_guest_twice() -> None:
    line = "cpu  1 2 4 1000 500 8 16 32 64 128\ncpu0 9 9 9 9 9 9 9 9 9 9\n"
    assert proc.parse_busy(line) == pytest.approx(63 / os.sysconf("SC_CLK_TCK"))


def test_peak_memory() -> None:
    assert proc.parse_peak_rss("VmPeak:  9 kB\nVmHWM:\t 3 kB\n") == 3072
    assert proc.parse_peak_rss("Name: kthreadd\n") == 0


def test_this_process_is_in_its_own_tree() -> None:
    assert proc.tree(os.getpid())[0].pid == os.getpid()
    assert proc.tree_cpu_s(os.getpid()) > 0
    assert proc.peak_rss_bytes(os.getpid()) > 1 << 20


def test_the_machine_is_read() -> None:
    text = "processor\t: 0\nmodel name\t: A: B\nflags\t\t: avx2 amx_bf16\n\nprocessor\t: 1\n"
    assert parse_cpuinfo(text) == {
        "processor": "0",
        "model name": "A: B",
        "flags": "avx2 amx_bf16",
    }
    assert parse_choice("always [madvise] never\n") == "madvise"


# Engines and environments.


def test_engines_to_compare_have_neighbouring_turns() -> None:
    found = [engine.name for engine in line_up(["a", "b"], ["openvino", "vllm"], ["bf16"])]
    assert found == ["jaxserve-a-bf16", "openvino-bf16", "jaxserve-b-bf16", "vllm-bf16"]
    assert peer("vllm", "int8") is None
    assert [e.name for e in line_up([], ["vllm", "openvino"], ["int8"])] == ["openvino-int8"]


def test_what_pip_says_last() -> None:
    text = "ERROR: one\nERROR: No matching distribution found for x\n\n[notice] a new pip\n"
    assert last_line(text) == "ERROR: No matching distribution found for x"
    assert last_line("") == ""


def test_an_environment_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(NotInstalled, match="no bin/python"):
        given_environment(tmp_path)


def test_share_of_8bit() -> None:
    assert share_of_8bit({"u8": 60, "i8": 30, "f16": 10}) == 0.9
    assert share_of_8bit({"f16": 10}) == 0


def test_a_gguf_is_copied_in_another_type(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    q4 = GGMLQuantizationType.Q4_1
    writer = GGUFWriter(tmp_path / "in.gguf", "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("w", quants.quantize(values, q4), raw_dtype=q4)
    writer.add_tensor("norm", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    requantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "Q8_0")
    reader = GGUFReader(tmp_path / "out.gguf")
    assert reader.fields["llama.block_count"].contents() == 3
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["general.file_type"].contents() == 7
    found = {t.name: quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    assert {t.name: t.tensor_type.name for t in reader.tensors} == {"w": "Q8_0", "norm": "F32"}
    coarse = quants.dequantize(quants.quantize(values, q4), q4)
    # Half a step of 8 bits of the largest value of a block.
    np.testing.assert_allclose(found["w"], coarse, atol=np.abs(coarse).max() / 254 * 1.01)
    np.testing.assert_array_equal(found["norm"], values[0])


# Workers, with an engine that only counts.

COUNTING = """
import os, sys
sys.path.insert(0, {root!r})
from benchmarks.peers.worker import Loaded, serve

def load(options):
    print("an engine's banner")
    if options.get("broken"):
        raise ValueError("no such model")
    calls = open(options["calls"], "a")
    def generate(prompts, max_tokens):
        print(options["name"], len(prompts), file=calls, flush=True)
        if prompts[0] == [666]:
            os._exit(3)
        short = options.get("short", 0)
        return [[p[0]] * (n - short if n > 1 else n) for p, n in zip(prompts, max_tokens)]
    return Loaded(generate, {{"load": "fine"}}, lambda: {{"end": True}})

serve(load)
"""


class Counting:
    """Starts workers of the counting engine, and knows their calls."""

    def __init__(self, directory: Path) -> None:
        self.calls = directory / "calls"
        self.calls.touch()
        self.log = directory / "log"
        self.options: dict[str, dict[str, Any]] = {}

    def __call__(self, engine: Engine) -> Worker:
        options = {"calls": str(self.calls), "name": engine.family}
        options.update(self.options.get(engine.family, {}))
        code = COUNTING.format(root=str(ROOT))
        command = [sys.executable, "-c", code, json.dumps(options)]
        return Worker(command, ROOT, self.log, os.environ)


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Counting]:
    return Counting(tmp_path)


OURS, THEIRS = Engine("o", "jaxserve", "bf16", "m"), Engine("p", "openvino", "bf16", "m")
ITEM = Item("fixed", 2, 2, (Request([3], 4), Request([5], 4)))


def test_a_worker_answers_and_keeps_its_prints_to_itself(counting: Counting) -> None:
    worker = counting(OURS)
    try:
        facts = worker.ready()
        assert facts.pop("load_s") >= 0
        assert facts == {"load": "fine"}
        worker.pause()
        worker.resume()
        answer = worker.generate([[7], [8]], [2, 1])
        assert answer.tokens == [[7, 7], [8]]
        assert answer.seconds >= 0
        assert worker.facts_at_end() == {"end": True}
        assert "banner" in counting.log.read_text()
        with pytest.raises(WorkerError, match="it has ended"):
            worker.generate([[666]], [1])
    finally:
        worker.close()


def test_a_worker_that_cannot_load_says_why(counting: Counting) -> None:
    counting.options["jaxserve"] = {"broken": True}
    worker = counting(OURS)
    try:
        with pytest.raises(WorkerError, match="ValueError: no such model"):
            worker.ready()
    finally:
        worker.close()


def test_engines_take_turns(counting: Counting) -> None:
    results, said = Results(), []
    with Group([OURS, THEIRS], counting, results, said.append) as group:
        group.measure(ITEM, 2, 1, [[3, 3, 3, 3], [5, 5, 9, 9]])
        group.finish()
    assert [(t.engine, t.repeat) for t in results.turns] == [("o", 0), ("p", 0), ("o", 1), ("p", 1)]
    # A turn is a call to wake up, one for first tokens and the whole.
    calls = counting.calls.read_text().split("\n")
    names = [line.split()[0] for line in calls if line]
    assert names == ["jaxserve", "openvino", *(["jaxserve"] * 3 + ["openvino"] * 3) * 2]
    assert results.agreement[0] == {
        "engine": "o",
        "item": "fixed-2",
        "equal_share": 6 / 8,
        "equal_requests": 1,
        "requests": 2,
        "first_differences": [2],
    }
    assert results.facts["p"]["end"] is True
    assert results.facts["p"]["peak_rss_at_ready_bytes"] > 1 << 20
    assert not results.failed


def test_an_engine_with_too_few_tokens_is_out_and_the_run_goes_on(counting: Counting) -> None:
    counting.options["openvino"] = {"short": 1}
    results = Results()
    with Group([OURS, THEIRS], counting, results, lambda _: None) as group:
        group.measure(Item("ragged", 2, 2, ITEM.requests), 1, 1, [])
    assert results.failed == {"p": "6 tokens instead of 8"}
    assert [t.engine for t in results.turns] == ["o"]
    assert [(m["engine"], m["item"]) for m in results.memory] == [("o", "ragged-2")]


# What is written.


def sample_document() -> dict[str, Any]:
    work = items((1, 8), (16,))
    engines = [ours("a", "bf16"), *filter(None, [peer("openvino", "bf16"), peer("vllm", "bf16")])]
    results = Results(failed={"vllm-bf16": "not installed: no file /opt/some where/x.whl"})
    for number, engine in enumerate(engines[:2]):
        package = "jax" if engine.ours else "openvino-genai"
        results.facts[engine.name] = {
            "versions": {"python": "3.11.7", package: "1.2.3"},
            "load_s": 2.0,
            "peak_rss_at_ready_bytes": 10**9,
            "idle_cores": 0.0,
            "kv_cache_bytes": 3 * 10**8,
        }
        for item in work:
            first = 0.1 if item.kind == "fixed" else None
            for repeat in range(3):
                rate = 100.0 * item.slots / (1 + number) + repeat
                plain = (engine.name, item.name, repeat, 2.0 + repeat, first, rate)
                results.turns.append(Turn(*plain, others=0.01 * 3**repeat, own_cores=1.9))
            found = agreement([[1, 2]], [[1, 3]])
            results.agreement.append({"engine": engine.name, "item": item.name, **found})
        results.memory.append(
            {"engine": engine.name, "item": "ragged-16", "peak_rss_bytes": 1.25 * 10**9}
        )
    machine = {
        "cpu": "A CPU",
        "cpu_family_model": "6/143",
        "features": ["avx2"],
        "without": [],
        "num_cores": 2,
        "virtual": True,
        "memory_bytes": 8 * 10**9,
        "transparent_huge_pages": "madvise",
        "kernel": "6.1",
        "load_average": 0.25,
    }
    settings = {"repeats": 3, "quiet_share": 0.05, "max_model_len": 1024, "took_s": 600.0}
    return document(machine, settings, engines, work, results)


def test_tables() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_the_page_has_every_number() -> None:
    text = markdown(sample_document(), "cpu.png")
    assert "| jaxserve bf16, jax 1.2.3 | **101** (100 to 102), 9.9 ms |" in text
    assert "| 16 | jaxserve bf16, jax 1.2.3 | **3.00** (2.00 to 4.00) | 1601 | 1.25 |" in text
    assert "| OpenVINO GenAI 1.2 bf16 | **1.98** (1.96 to 2.00) |" in text
    assert "50.0 % (0 of 1, median 1)" in text
    assert "KV pool of 0.3 GB" in text
    assert "12 of 18 turns were quiet" in text
    assert "- vLLM CPU ? bf16: not installed: no file (path) where/x.whl" in text
    assert "![Decode throughput and ragged wall times](cpu.png)" in text


def test_fewer_repeats_are_said() -> None:
    doc = sample_document()
    assert "repeats: 3. Numbers" in markdown(doc, None)
    less = [
        {**row, "repeats": 2} if row["engine"] == "openvino-bf16" else row for row in doc["rows"]
    ]
    assert "repeats: 3, of OpenVINO GenAI 1.2 bf16 2. Num" in markdown({**doc, "rows": less}, None)


def test_a_page_of_one_engine_alone() -> None:
    doc = sample_document()
    alone = {**doc, "ratios": [], "agreement": [], "engines": doc["engines"][:1]}
    text = markdown(alone, None)
    for absent in ("Times as fast", "agreement", "![", "Not measured", "OpenVINO GenAI 1.2"):
        assert absent not in text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("no /opt/a/b.so here", "no (path) here"),
        ("see https://host.example/simple/x/ now", "see (address) now"),
        ("'/tmp/x' and ~/a/b", "'(path)' and (path)"),
        ("a rate of 5 tokens/s, bf16/int8, 6/143", "a rate of 5 tokens/s, bf16/int8, 6/143"),
    ],
)
def test_paths_and_addresses_stay_here(text: str, clean: str) -> None:
    assert without_paths(text) == clean


def test_engines_that_would_share_a_name_keep_their_own() -> None:
    facts = {"versions": {"jax": "1"}}
    same = {"family": "jaxserve", "weights": "bf16", "facts": facts}
    found = labels([{"name": "a", **same}, {"name": "b", **same}])
    assert found == {
        "a": "jaxserve bf16, jax 1 (a)",
        "b": "jaxserve bf16, jax 1 (b)",
    }


def test_pages_are_written_again_from_the_record(tmp_path: Path) -> None:
    doc = sample_document()
    (tmp_path / "cpu.json").write_text(json.dumps(doc))
    done = CliRunner().invoke(main, ["--redraw", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "cpu.md").read_text()
    assert page == markdown(doc, "cpu.png" if (tmp_path / "cpu.png").exists() else None)


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_pages(sample_document(), tmp_path)
    assert (tmp_path / "cpu.png").read_bytes()[1:4] == b"PNG"


def test_wrong_usage_is_said(tmp_path: Path) -> None:
    for arguments, text in (
        (["--fixed-slots", "64"], "there are 32 requests"),
        (["--ours", "python3"], "is not of the form NAME=PATH"),
        (["--peer", "other"], "'other' is not one of"),
    ):
        done = CliRunner().invoke(main, [*arguments, "--output", str(tmp_path)])
        assert done.exit_code == 2
        assert text in done.output

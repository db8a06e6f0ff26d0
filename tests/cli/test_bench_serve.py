"""`jaxserve bench serve`: what is asked, when, and what is made of the answers."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from starlette.responses import Response

from jaxserve.bench.serve import ClosedLoop, OpenLoop, figures, loops
from jaxserve.bench.serve_client import Answered
from jaxserve.bench.serve_data import WORDS, Ask, RandomData, read_asks
from jaxserve.cli import main
from jaxserve.plot import curve
from jaxserve.plot.files import SweepFile, read
from scheduler.summary import Bounds
from tests.cli.stub_server import Stub, error

SMALL = ("--num-prompts", 6, "--prompt-tokens", 5, "--output-tokens", 4, "--length-spread", 0)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


def bench(stub: Stub, *arguments: Any) -> Result:
    given = ["bench", "serve", "--url", stub.url, *arguments]
    return CliRunner().invoke(main, [str(part) for part in given])


def report(stub: Stub, *arguments: Any) -> dict[str, Any]:
    result = bench(stub, "--json", *arguments)
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def test_help_imports_no_jax() -> None:
    code = """
import sys
from click.testing import CliRunner
from jaxserve.cli import main
result = CliRunner().invoke(main, ["bench", "serve", "--help"])
assert result.exit_code == 0, result.output
slow = {"jax", "numpy", "transformers", "tokenizers", "flax", "httpx"} & sys.modules.keys()
assert not slow, slow
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class TestData:
    DATA = RandomData(
        num_requests=50, prompt_tokens=20, output_tokens=10, length_spread=0.5, seed=3
    )

    def test_random_lengths_are_within_the_spread_and_ids_below_the_vocabulary(self) -> None:
        asks = self.DATA.asks(100)
        lengths = {len(ask.prompt_token_ids or ()) for ask in asks}
        assert min(lengths) >= 10
        assert max(lengths) <= 30
        assert len(lengths) > 5
        assert {ask.max_tokens for ask in asks} <= set(range(5, 16))
        assert {i for ask in asks for i in ask.prompt_token_ids or ()} == set(range(100))

    def test_runs_have_other_contents_of_equal_lengths(self) -> None:
        first, second = self.DATA.asks(1000, run=0), self.DATA.asks(1000, run=1)
        assert first == self.DATA.asks(1000, run=0)
        assert [len(a.prompt_token_ids or ()) for a in first] == [
            len(a.prompt_token_ids or ()) for a in second
        ]
        assert [a.max_tokens for a in first] == [a.max_tokens for a in second]
        assert not {a.prompt_token_ids for a in first} & {a.prompt_token_ids for a in second}

    def test_without_a_vocabulary_there_are_words(self) -> None:
        for ask in self.DATA.asks(None):
            assert ask.prompt is not None
            assert set(ask.prompt.split()) <= set(WORDS)

    def test_prefixes_are_shared_and_the_rest_is_not(self) -> None:
        data = RandomData(
            num_requests=40, prompt_tokens=8, output_tokens=1, prefix_tokens=30, num_prefixes=3
        )
        prompts = [ask.prompt_token_ids or () for ask in data.asks(10_000)]
        assert {len(prompt) for prompt in prompts} == {38}
        assert len({prompt[:30] for prompt in prompts}) == 3
        assert len({prompt[30:] for prompt in prompts}) == 40

    @pytest.mark.parametrize(
        "wrong",
        [{"length_spread": 1.0}, {"prompt_tokens": 0}, {"num_prefixes": 0}, {"prefix_tokens": -1}],
    )
    def test_a_number_out_of_range_is_named(self, wrong: dict[str, Any]) -> None:
        (name,) = wrong
        with pytest.raises(ValueError, match=name):
            RandomData(**{"num_requests": 1, "prompt_tokens": 1, "output_tokens": 1, **wrong})

    def test_the_forms_of_a_file(self, tmp_path: Path) -> None:
        turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "x" * 41}]
        entries: list[dict[str, Any]] = [
            {"prompt": "a b", "max_tokens": 3},
            {"prompt_token_ids": [1, 2], "max_tokens": 4, "unknown": 1},
            {"messages": [{"role": "user", "content": "hi"}]},
            {"conversations": turns, "id": "s1"},
            {"conversations": turns[:1], "id": "too short"},
        ]
        expected = [
            Ask(3, prompt="a b"),
            Ask(4, prompt_token_ids=(1, 2)),
            Ask(7, messages=({"role": "user", "content": "hi"},)),
            Ask(10, prompt="hello"),
        ]
        path = tmp_path / "x"
        path.write_text(json.dumps(entries))
        assert read_asks(path, output_tokens=7) == expected
        path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
        assert read_asks(path, output_tokens=7) == expected
        assert read_asks(path, 2, output_tokens=7) == expected[:2]
        with pytest.raises(ValueError, match=r"num_prompts=5, but .* has 4"):
            read_asks(path, 5)

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ("", "no requests"),
            ("[]", "no requests"),
            ("{bad", "not a file of requests"),
            ('{"prompt": 5}', "not a file of requests"),
            ('{"max_tokens": 5}', "request 0: give one of"),
            ('[{"prompt": "a"}, {"prompt": "a", "messages": []}]', "request 1: give one of"),
            ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0"),
        ],
    )
    def test_other_files_are_refused(self, tmp_path: Path, content: str, complaint: str) -> None:
        (tmp_path / "x").write_text(content)
        with pytest.raises(ValueError, match=complaint):
            read_asks(tmp_path / "x")

    def test_a_prompt_must_suit_the_endpoint(self) -> None:
        with pytest.raises(ValueError, match="--endpoint completions"):
            Ask(1, prompt_token_ids=(1,)).body(is_chat=True)
        with pytest.raises(ValueError, match="--endpoint chat"):
            Ask(1, messages=()).body(is_chat=False)


class TestLoops:
    def test_poisson_gaps_have_the_rates_mean_and_deviation(self) -> None:
        """20,000 gaps: the standard error of either is below 1 %."""
        due = OpenLoop(4.0).due_s(20_000, seed=0)
        gaps = [after - before for before, after in pairwise(due)]
        assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
        assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)

    @pytest.mark.parametrize("burstiness", [0.25, 4.0])
    def test_burstiness_is_the_shape_of_the_gaps(self, burstiness: float) -> None:
        due = OpenLoop(10.0, burstiness).due_s(40_000, seed=1)
        gaps = [after - before for before, after in pairwise(due)]
        assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
        assert statistics.stdev(gaps) == pytest.approx(0.1 / math.sqrt(burstiness), rel=0.05)

    def test_each_value_is_a_load(self) -> None:
        assert list(loops((0.5, 2), (), 3.0)) == [OpenLoop(0.5, 3.0), OpenLoop(2, 3.0)]
        assert list(loops((), (1, 8), 1.0)) == [ClosedLoop(1), ClosedLoop(8)]

    @pytest.mark.parametrize("given", [((), ()), ((1.0,), (1,)), ((0.0,), ()), ((), (0,))])
    def test_other_loads_are_refused(self, given: Any) -> None:
        with pytest.raises(ValueError, match=r"request.rate|concurrency"):
            list(loops(*given, 1.0))


class TestFigures:
    ANSWERS = (
        Answered(0.0, 0.0, 0.5, [0.1, 0.3], 1.0, 10, 4, 6, 200),
        Answered(0.5, 0.1, 0.2, [0.2], 1.5, 20, 0, 4, 200),
        Answered(0.9, status=429, error="status 429: busy"),
        Answered(1.9, status=None, error="ReadError"),
    )

    def test_they_are_of_what_was_answered(self) -> None:
        row = figures(self.ANSWERS, bounds=Bounds())
        assert (row["num_requests"], row["num_answered"]) == (4, 2)
        assert (row["num_refused"], row["num_failed"]) == (1, 1)
        assert row["errors"] == {"status 429: busy": 1, "ReadError": 1}
        assert row["wall_s"] == 2.0
        assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (30, 4, 10)
        assert row["output_tokens_per_s"] == 5.0
        assert row["requests_per_s"] == 1.0
        assert row["ttft_p50_s"] == pytest.approx(0.35)
        assert row["tpot_mean_s"] == pytest.approx((0.5 / 5 + 1.3 / 3) / 2)
        assert row["itl_mean_s"] == pytest.approx(0.2)
        assert row["e2e_p50_s"] == pytest.approx(1.25)
        assert row["max_in_flight"] == 2
        assert row["goodput_share"] is None

    def test_goodput_counts_all_and_needs_every_bound(self) -> None:
        row = figures(self.ANSWERS, bounds=Bounds(ttft_s=0.4))
        assert row["goodput_share"] == 0.25
        assert row["goodput_requests_per_s"] == 0.5
        assert figures(self.ANSWERS, bounds=Bounds(0.4, 0.2))["goodput_share"] == 0.0

    def test_a_run_without_an_answer_has_no_latency(self) -> None:
        row = figures(self.ANSWERS[2:], bounds=Bounds())
        assert row["ttft_mean_s"] is row["tpot_p99_s"] is row["itl_p50_s"] is None
        assert row["output_tokens"] == 0

    def test_the_machine_has_a_price(self) -> None:
        row = figures(self.ANSWERS, bounds=Bounds(), cost_per_hour=36.0)
        assert row["cost_per_million_tokens"] == pytest.approx(0.01 / 5 * 1e6)


class TestAgainstAServer:
    def test_a_closed_loop_keeps_its_users_busy(self, stub: Stub) -> None:
        stub.hold = 3
        (row,) = report(stub, *SMALL, "--concurrency", 3, "--num-warmups", 0)["rows"]
        assert row["concurrency"] == 3
        assert row["num_answered"] == 6
        assert stub.most_at_once == 3
        assert row["max_in_flight"] == 3
        assert row["output_tokens"] == 6 * 4
        assert row["prompt_tokens"] == 6 * 5
        assert row["cached_tokens"] == 6
        assert 0 < row["ttft_p50_s"] <= row["e2e_p50_s"]

    def test_an_open_loop_does_not_wait_for_answers(self, stub: Stub) -> None:
        stub.hold = 6
        (row,) = report(stub, *SMALL, "--request-rate", 1000, "--num-warmups", 0)["rows"]
        assert row["request_rate"] == 1000
        assert row["num_answered"] == 6
        assert stub.most_at_once == 6

    def test_a_run_per_value_and_the_lengths_of_all_are_equal(self, stub: Stub) -> None:
        value = report(stub, "--num-prompts", 5, "--concurrency", "1,2", "--num-warmups", 2)
        assert [row["concurrency"] for row in value["rows"]] == [1, 2]
        first, second = value["rows"]
        assert first["output_tokens"] == second["output_tokens"]
        assert len(stub.bodies) == 2 + 5 + 5
        assert stub.bodies[2]["prompt"] != stub.bodies[7]["prompt"]

    def test_token_ids_where_the_vocabulary_is_told_and_words_elsewhere(self, stub: Stub) -> None:
        assert report(stub, *SMALL)["load"]["prompts_are"] == "words"
        assert isinstance(stub.bodies[-1]["prompt"], str)
        stub.vocab_size = 50
        assert report(stub, *SMALL)["load"]["prompts_are"] == "token ids"
        assert max(stub.bodies[-1]["prompt"]) < 50
        report(stub, *SMALL, "--vocab-size", 3)
        assert max(stub.bodies[-1]["prompt"]) < 3
        report(stub, *SMALL, "--endpoint", "chat")
        assert isinstance(stub.bodies[-1]["messages"][0]["content"], str)

    def test_bodies_say_what_the_flags_say(self, stub: Stub) -> None:
        report(stub, *SMALL, "--extra-body", '{"top_k": 5}', "--api-key", "secret")
        body = stub.bodies[-1]
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("stub", 4, 0.0)
        assert body["ignore_eos"] is True
        assert body["top_k"] == 5
        assert body["stream_options"] == {"include_usage": True}
        assert stub.headers[-1]["authorization"] == "Bearer secret"
        report(stub, *SMALL, "--no-ignore-eos", "--model", "other", "--endpoint", "chat")
        body = stub.bodies[-1]
        assert "ignore_eos" not in body
        assert (body["model"], body["max_completion_tokens"]) == ("other", 4)
        assert stub.paths[-1] == "/v1/chat/completions"

    def test_a_file_is_asked_as_it_is(self, stub: Stub, tmp_path: Path) -> None:
        path = tmp_path / "w.jsonl"
        lines = [{"prompt": f"line {n}", "max_tokens": n} for n in (1, 2, 3)]
        path.write_text("\n".join(map(json.dumps, lines)))
        (row,) = report(stub, "--workload", path, "--concurrency", 1, "--num-warmups", 0)["rows"]
        asked = [{"prompt": b["prompt"], "max_tokens": b["max_tokens"]} for b in stub.bodies]
        assert asked == lines
        assert row["output_tokens"] == 6

    @pytest.mark.parametrize("endpoint", ["completions", "chat"])
    def test_tokens_are_counted_by_usage_and_gaps_by_chunks(
        self, stub: Stub, endpoint: str
    ) -> None:
        stub.tokens_per_chunk = 3
        flags = ("--num-prompts", 2, "--output-tokens", 7, "--length-spread", 0, "--details")
        (row,) = report(stub, *flags, "--endpoint", endpoint)["rows"]
        assert row["output_tokens"] == 14
        for one in row["requests"]:
            assert len(one["gaps_s"]) == 2
            assert one["tpot_s"] == pytest.approx((one["e2e_s"] - one["ttft_s"]) / 6)
            assert one["ttft_s"] + sum(one["gaps_s"]) == pytest.approx(one["e2e_s"])

    def test_without_usage_a_chunk_is_a_token(self, stub: Stub) -> None:
        stub.with_usage = False
        (row,) = report(stub, *SMALL)["rows"]
        assert row["output_tokens"] == 6 * 4

    def test_refusals_are_a_result_and_failures_are_not(self, stub: Stub) -> None:
        replies = {2: (429, "busy"), 3: (503, "draining"), 4: (500, "broken")}

        def intercept(number: int, body: dict[str, Any]) -> Response | None:
            return error(*replies[number]) if number in replies else None

        stub.intercept = intercept
        result = bench(stub, *SMALL, "--json", "--concurrency", 1)
        (row,) = json.loads(result.stdout)["rows"]
        assert (row["num_answered"], row["num_refused"], row["num_failed"]) == (3, 2, 1)
        assert "1 without an answer: status 500: broken" in result.stderr
        assert result.exit_code == 1
        del replies[4]
        stub.bodies.clear()
        assert bench(stub, *SMALL, "--concurrency", 1).exit_code == 0

    @pytest.mark.parametrize(
        ("tail", "message"),
        [
            (
                [b'data: {"error": {"message": "not finite"}}\n\n', b"data: [DONE]\n\n"],
                "not finite",
            ),
            ([], "the stream ended early"),
            ([b"data: {bad\n\n"], "DecodeError"),
        ],
    )
    def test_a_stream_that_breaks_is_no_answer(
        self, stub: Stub, tail: list[bytes], message: str
    ) -> None:
        stub.tail = lambda body: tail
        result = bench(stub, *SMALL, "--json", "--num-warmups", 0)
        (row,) = json.loads(result.stdout)["rows"]
        assert row["num_failed"] == 6
        assert row["output_tokens"] == 0
        assert message in next(iter(row["errors"]))

    def test_a_warm_up_that_fails_ends_it(self, stub: Stub) -> None:
        stub.intercept = lambda number, body: error(400, "max_tokens is too large")
        result = bench(stub, *SMALL)
        assert result.exit_code == 1
        assert "before the run failed: status 400: max_tokens is too large" in result.stderr
        assert len(stub.bodies) == 1

    def test_a_server_that_is_not_there_is_named(self) -> None:
        with Stub() as gone:
            pass
        result = bench(gone, *SMALL)
        assert result.exit_code == 1
        assert f"no server answers at {gone.url}" in result.stderr

    def test_both_kinds_of_load_at_once_are_refused(self, stub: Stub) -> None:
        result = bench(stub, "--request-rate", 1, "--concurrency", 1)
        assert result.exit_code == 1
        assert "--request-rate (open loop) and --concurrency (closed loop)" in result.stderr

    def test_a_table_has_a_line_per_run(self, stub: Stub) -> None:
        flags = ("--concurrency", "1,4", "--max-ttft-ms", 60_000, "--cost-per-hour", 1)
        result = bench(stub, *SMALL, *flags)
        _, header, *lines = result.stdout.splitlines()
        assert "TTFT mean/P50/P99" in header
        assert header.rstrip().endswith("goodput/s  cost/M tokens")
        assert [line.split("  ")[-0].strip() for line in lines] == ["1 user", "4 users"]

    @pytest.mark.parametrize(
        ("flag", "axis"), [("--concurrency", "concurrency"), ("--request-rate", "request_rate")]
    )
    def test_plot_takes_the_result(self, stub: Stub, tmp_path: Path, flag: str, axis: str) -> None:
        path = tmp_path / "served.json"
        bench(stub, *SMALL, flag, "50,100,200", "--save-result", path, "--label", "stub")
        sweep = read(path)
        assert isinstance(sweep, SweepFile)
        one = curve.curve(sweep.label, sweep.rows, "ttft_p99")
        assert (one.label, one.axis.key, one.sizes) == ("stub", axis, (50, 100, 200))
        pytest.importorskip("matplotlib")
        picture = tmp_path / "x.png"
        result = CliRunner().invoke(main, ["plot", str(path), "-o", str(picture)])
        assert result.exit_code == 0, result.output
        assert picture.read_bytes().startswith(b"\x89PNG")

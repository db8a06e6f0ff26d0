"""`jaxserve run-batch --url`: a server answers, and every line gets exactly one record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from starlette.responses import JSONResponse, PlainTextResponse, Response

from jaxserve.batch_file import BatchJob
from jaxserve.batch_remote import LONGEST_PAUSE_S, Patience, ServerLost, run_remote
from jaxserve.cli import main
from jaxserve.remote import RemoteServer
from tests.cli.stub_server import Stub, error, text_of

QUICK = Patience(refused_s=60, silent_s=0, first_pause_s=0.001)


def line(custom_id: Any, prompt: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 3, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def chat_line(custom_id: str, text: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return {"custom_id": custom_id, "url": "/v1/chat/completions", "body": body}


LINES = [line(f"{number}", "p" * number) for number in range(1, 13)]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        yield stub


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def batch(source: Path, out: Path) -> Callable[..., Result]:
    def call(stub: Stub, *arguments: Any) -> Result:
        given = ["run-batch", "-i", source, "-o", out, "--url", stub.url, *arguments]
        return CliRunner().invoke(main, [str(part) for part in given])

    return call


def write(path: Path, *lines: Any) -> None:
    path.write_text(
        "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    )


def records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(raw) for raw in whole.splitlines()]


def texts(path: Path) -> dict[str, str]:
    """custom_id to text, of the answered lines; also that no line is there twice."""
    answered = [record for record in records(path) if record["error"] is None]
    found = {r["custom_id"]: said(r["response"]["body"]["choices"][0]) for r in answered}
    assert len(found) == len(answered)
    return found


def said(choice: dict[str, Any]) -> str:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert isinstance(text, str)
    return text


def expected(*lines: dict[str, Any]) -> dict[str, str]:
    return {one["custom_id"]: text_of(one["body"]) for one in lines}


def run(stub: Stub, source: Path, out: Path, **settings: Any) -> Any:
    job = BatchJob.open(source, out, "stub", resume=True)
    given = {"concurrency": 4, "patience": QUICK, **settings}
    return run_remote(job, RemoteServer(url=stub.url), **given)


class TestAnswers:
    def test_every_line_is_asked_as_it_is(
        self, stub: Stub, source: Path, out: Path, batch: Callable[..., Result]
    ) -> None:
        lines = [*LINES, chat_line("chat", "hello")]
        write(source, *lines)
        result = batch(stub, "--api-key", "secret")
        assert result.exit_code == 0, result.output
        assert result.stdout == ""
        assert texts(out) == expected(*lines)
        by_path = Counter(stub.paths)
        assert by_path == {"/v1/completions": 12, "/v1/chat/completions": 1}
        assert {body.pop("model") for body in stub.bodies} == {"stub"}
        bodies = sorted(map(json.dumps, stub.bodies))
        assert bodies == sorted(json.dumps(one["body"]) for one in lines)
        assert {headers["authorization"] for headers in stub.headers} == {"Bearer secret"}

    def test_the_answers_are_the_servers_own(
        self, stub: Stub, source: Path, out: Path, batch: Callable[..., Result]
    ) -> None:
        write(source, LINES[0])
        batch(stub)
        (record,) = records(out)
        assert record["response"]["status_code"] == 200
        assert record["response"]["body"]["id"] == "answer-1"
        assert record["response"]["body"]["usage"]["total_tokens"] == 4

    def test_many_are_asked_at_once_but_not_more(
        self, stub: Stub, source: Path, out: Path, batch: Callable[..., Result]
    ) -> None:
        stub.hold = 5
        write(source, *LINES)
        assert batch(stub, "--concurrency", 5).exit_code == 0
        assert stub.most_at_once == 5
        assert len(texts(out)) == 12

    def test_a_url_may_end_as_clients_want_it(
        self, stub: Stub, source: Path, out: Path, batch: Callable[..., Result]
    ) -> None:
        write(source, LINES[0])
        stub.url += "/v1/"
        assert batch(stub).exit_code == 0
        assert stub.paths == ["/v1/completions"]

    def test_the_model_is_the_servers_unless_named(
        self, stub: Stub, source: Path, out: Path, batch: Callable[..., Result]
    ) -> None:
        write(source, line("a", "x", model="mine"), line("b", "x", model=None))
        assert batch(stub, "--served-model-name", "mine").exit_code == 0
        assert [body["model"] for body in stub.bodies] == ["mine", "mine"]
        out.unlink()
        assert batch(stub).exit_code == 1
        assert stub.bodies[-1]["model"] == "stub"
        assert texts(out).keys() == {"b"}


class TestFailures:
    def test_bad_lines_cost_a_record_and_are_not_sent(
        self, stub: Stub, source: Path, out: Path, batch: Callable[..., Result]
    ) -> None:
        write(source, "{bad", LINES[0], line("t", "x", temperature=-1), LINES[1])
        assert batch(stub).exit_code == 1
        assert texts(out) == expected(*LINES[:2])
        assert len(stub.bodies) == 2
        failed = {r["error"]["line"] for r in records(out) if r["error"] is not None}
        assert failed == {1, 3}

    @pytest.mark.parametrize("status", [400, 404, 413, 500])
    def test_what_the_server_refuses_for_good_is_a_record(
        self, stub: Stub, source: Path, out: Path, batch: Callable[..., Result], status: int
    ) -> None:
        stub.intercept = lambda n, body: (
            error(status, "too long") if body["prompt"] == "p" else None
        )
        write(source, *LINES)
        assert batch(stub).exit_code == 1
        (failure,) = [record for record in records(out) if record["error"] is not None]
        assert failure["custom_id"] == "1"
        assert failure["response"]["status_code"] == status
        assert failure["error"] == {"code": "no", "message": "too long", "line": 1}
        assert len(texts(out)) == 11
        assert len(stub.bodies) == 12

    def test_an_answer_that_is_no_json_is_a_failure(
        self, stub: Stub, source: Path, out: Path, batch: Callable[..., Result]
    ) -> None:
        stub.intercept = lambda number, body: PlainTextResponse("<html>")
        write(source, LINES[0])
        assert batch(stub).exit_code == 1
        (record,) = records(out)
        assert record["response"]["status_code"] == 502
        assert "no JSON object" in record["error"]["message"]

    @pytest.mark.parametrize("status", [429, 502, 503, 504])
    def test_refusals_and_breaks_are_waited_out(
        self, stub: Stub, source: Path, out: Path, status: int
    ) -> None:
        """Each line is refused at first, and two of them twice."""
        refused: Counter[str] = Counter()

        def intercept(number: int, body: dict[str, Any]) -> Response | None:
            prompt = body["prompt"]
            if refused[prompt] == 1 + (len(prompt) < 3):
                return None
            refused[prompt] += 1
            return error(status, **{"Retry-After": "0"})

        stub.intercept = intercept
        write(source, *LINES)
        report = run(stub, source, out, patience=Patience(first_pause_s=0.001))
        assert (report.num_answered, report.num_failed, report.interrupted) == (12, 0, False)
        assert texts(out) == expected(*LINES)
        assert len(stub.bodies) == 12 + 12 + 2

    def test_a_connection_that_breaks_is_tried_again(
        self, stub: Stub, source: Path, out: Path
    ) -> None:
        def intercept(number: int, body: dict[str, Any]) -> Response | None:
            if number >= 3:
                return None
            return PlainTextResponse("cut", headers={"content-length": "1000"})

        stub.intercept = intercept
        write(source, *LINES)
        run(stub, source, out, patience=Patience(first_pause_s=0.001))
        assert texts(out) == expected(*LINES)
        assert len(stub.bodies) == 15

    def test_an_answer_that_was_cut_off_is_none(self, stub: Stub, source: Path, out: Path) -> None:
        """As of a server that shuts down; a text that has the word is a text."""
        choices = [{"index": 0, "text": "pa", "finish_reason": "abort"}]
        word = {"choices": [{"index": 0, "text": '"abort"', "finish_reason": "stop"}]}
        stub.intercept = lambda number, body: (
            JSONResponse({"choices": choices})
            if number < 4
            else JSONResponse(word)
            if body["prompt"] == "p"
            else None
        )
        write(source, *LINES)
        run(stub, source, out, patience=Patience(first_pause_s=0.001))
        assert texts(out) == expected(*LINES) | {"1": '"abort"'}
        assert len(stub.bodies) == 16

    @pytest.mark.parametrize(
        "answer", [PlainTextResponse("cut", headers={"content-length": "9"}), error(504, "late")]
    )
    def test_a_line_that_breaks_every_time_is_a_record(
        self, stub: Stub, source: Path, out: Path, answer: Response
    ) -> None:
        stub.intercept = lambda number, body: answer if body["prompt"] == "pp" else None
        write(source, *LINES)
        report = run(stub, source, out)
        assert (report.num_answered, report.num_failed) == (11, 1)
        (failure,) = [record for record in records(out) if record["error"] is not None]
        assert failure["custom_id"] == "2"
        assert failure["error"]["code"] == "connection_error"

    def test_a_line_is_not_given_up_while_others_are_answered(
        self, stub: Stub, source: Path, out: Path
    ) -> None:
        """It is refused for 11 s, and in each of them another line is answered."""
        write(source, *LINES)
        now_s = [0.0]

        def intercept(number: int, body: dict[str, Any]) -> Response | None:
            if body["prompt"] != "p":
                now_s[0] += 1
            elif len(records(out)) < 11:
                return error(429)
            return None

        stub.intercept = intercept
        patience = Patience(refused_s=2.5, first_pause_s=0.001)
        report = run(stub, source, out, patience=patience, concurrency=2, clock=lambda: now_s[0])
        assert now_s == [11.0]
        assert report.num_answered == 12

    def test_pauses_double_up_to_a_limit_unless_the_server_names_one(self) -> None:
        patience = Patience(first_pause_s=1.0)
        for attempt in range(100):
            longest = min(2.0**attempt, LONGEST_PAUSE_S)
            assert longest / 2 <= patience.pause_s(attempt, None) <= longest
        assert patience.pause_s(50, 2.5) == 2.5
        assert patience.pause_s(0, 1e9) == LONGEST_PAUSE_S
        assert patience.pause_s(0, -1.0) == 0.0


class TestLostServers:
    def test_no_line_is_taken_for_failed(self, source: Path, out: Path) -> None:
        write(source, *LINES)
        with Stub() as stub:
            answered: list[None] = []

            def on_record() -> None:
                answered.append(None)
                if len(answered) == 5:
                    stub.stop()

            with pytest.raises(ServerLost, match="continue with --resume"):
                run(stub, source, out, on_record=on_record)
        kept = texts(out)
        assert 5 <= len(kept) < 12
        assert len(records(out)) == len(kept)
        with Stub() as other:
            report = run(other, source, out)
        assert report.num_answered == 12 - len(kept)
        assert texts(out) == expected(*LINES)

    def test_a_server_that_refuses_for_ever_ends_the_run(
        self, stub: Stub, source: Path, out: Path
    ) -> None:
        stub.intercept = lambda number, body: error(503, "draining")
        write(source, *LINES)
        with pytest.raises(ServerLost, match=r"status 503: draining"):
            run(stub, source, out, patience=Patience(refused_s=0.05, first_pause_s=0.001))
        assert records(out) == []

    def test_a_server_that_is_not_there_is_named(
        self, source: Path, out: Path, batch: Callable[..., Result]
    ) -> None:
        write(source, *LINES)
        with Stub() as gone:
            pass
        result = batch(gone)
        assert result.exit_code == 1
        assert f"no server answers at {gone.url}" in result.stderr
        assert not out.exists()

    def test_an_address_that_is_none_is_named(
        self, source: Path, out: Path, batch: Callable[..., Result], stub: Stub
    ) -> None:
        write(source, *LINES)
        result = batch(stub, "--url", "http://x:port")
        assert result.exit_code == 1
        assert "http://x:port" in result.stderr


class TestResume:
    def test_a_finished_job_is_not_asked_again(
        self, stub: Stub, source: Path, out: Path, batch: Callable[..., Result]
    ) -> None:
        write(source, *LINES)
        batch(stub)
        before = out.read_bytes()
        stub.bodies.clear()
        assert batch(stub, "--resume").exit_code == 0
        assert stub.bodies == []
        assert out.read_bytes() == before

    def test_a_cut_at_any_record_costs_what_is_missing(
        self, stub: Stub, source: Path, out: Path
    ) -> None:
        write(source, *LINES[:4])
        run(stub, source, out)
        whole = out.read_bytes()
        for cut in range(0, len(whole), 97):
            out.write_bytes(whole[:cut])
            # Without its line feed a record is still whole.
            num_whole = sum(end <= cut for end, byte in enumerate(whole) if byte == ord("\n"))
            assert run(stub, source, out).num_answered == 4 - num_whole
            assert texts(out) == expected(*LINES[:4])

    def test_a_stop_leaves_a_resumable_file(self, stub: Stub, source: Path, out: Path) -> None:
        write(source, *LINES)
        answered: list[None] = []

        def intercept(number: int, body: dict[str, Any]) -> Response | None:
            return None if number < 3 else error(429)

        stub.intercept = intercept
        report = run(
            stub,
            source,
            out,
            on_record=lambda: answered.append(None),
            should_stop=lambda: len(answered) == 3,
        )
        assert report.interrupted
        assert len(texts(out)) == len(records(out)) == 3
        stub.intercept = lambda number, body: None
        assert run(stub, source, out).num_answered == 9
        assert texts(out) == expected(*LINES)

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_the_process_in_order(
        self, stub: Stub, source: Path, out: Path, signum: signal.Signals
    ) -> None:
        write(source, *LINES)
        stub.intercept = lambda number, body: None if number < 4 else error(503)
        command = [sys.executable, "-m", "jaxserve", "run-batch", "-i", source, "-o", out]
        process = subprocess.Popen(
            [*map(str, command), "--url", stub.url],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONWARNINGS": "error"},
            stderr=subprocess.PIPE,
            text=True,
        )
        until = time.monotonic() + 60
        while len(stub.bodies) < 12 or len(records(out)) < 4:
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(signum)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 128 + signum, log
        assert "interrupted; continue with --resume" in log
        assert "Traceback" not in log
        assert len(texts(out)) == len(records(out)) == 4
        stub.intercept = lambda number, body: None
        run(stub, source, out)
        assert texts(out) == expected(*LINES)

"""`jaxserve run-batch`: every line gets its record, and an interrupted job goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from jaxserve.batch_file import BatchJob
from jaxserve.batch_run import run_batch
from jaxserve.config import EngineConfig
from tests.cli import fakes
from tests.cli.fakes import FakeLLM, answer


def line(custom_id, prompt, **body):
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "max_tokens": 4, **body},
    }


def write(path, *lines):
    path.write_bytes(
        b"\n".join(raw if isinstance(raw, bytes) else json.dumps(raw).encode() for raw in lines)
    )


def records(path):
    return [json.loads(raw) for raw in path.read_bytes().rpartition(b"\n")[0].split(b"\n")]


def texts(path):
    """custom_id to text, of the answered lines; also that no line is there twice."""
    answered = [record for record in records(path) if record["error"] is None]
    found = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in answered}
    assert len(found) == len(answered)
    return found


def run_with_fake(job):
    llm = FakeLLM(config=EngineConfig())
    run_batch(job, lambda: llm, max_in_engine=1)
    return llm


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def batch(jaxserve_cli, files):
    def call(*arguments):
        return jaxserve_cli("run-batch", "-i", files[0], "-o", files[1], *arguments)

    return call


BAD = [
    b"{bad",
    b"[1,2]",
    b"null",
    b'{"custom_id": "no body", "method": "POST", "url": "/v1/completions"}',
    json.dumps({**line("wrong url", "x"), "url": "/v1/nothing"}).encode(),
    json.dumps(line("bad value", "x", temperature=-5)).encode(),
    json.dumps(line("bad type", "x", temperature="hot")).encode(),
    json.dumps(line("out of vocabulary", "x", logit_bias={"999": 1})).encode(),
    json.dumps(line("too long", "x" * 5_000_000)).encode(),
    json.dumps(line("too long in part", ["x", "x" * 500])).encode(),
    json.dumps(line("fails", "FAIL")).encode(),
    json.dumps(line("fails in part", ["x", "FAIL"])).encode(),
    json.dumps(line(None, "no id")).encode(),
    json.dumps(line(17, "numeric id")).encode(),
    json.dumps(line("other model", "x", model="gpt-x")).encode(),
    json.dumps(
        {
            "custom_id": "template",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {"explode": True},
            },
        }
    ).encode(),
    b'{"custom_id": "invalid \xff"}',
    b'{"custom_id": "half a surrogate \\ud800"}',
    json.dumps(line("a deadline", "x", timeout=3)).encode(),
]


class TestBadLines:
    """B62."""

    @pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
    def test_a_bad_line_costs_one_record(self, batch, files, fake_model, bad):
        write(files[0], line("1", "one"), bad, line("2", "two"))
        result = batch()
        assert result.exit_code == 1, result.output
        assert result.stdout == ""
        found = records(files[1])
        assert len(found) == 3
        assert texts(files[1]) == {"1": answer("one", 4), "2": answer("two", 4)}
        (failure,) = [record for record in found if record["error"] is not None]
        assert failure["error"]["line"] == 2
        assert failure["error"]["message"]
        assert failure["response"]["status_code"] >= 400
        assert failure["response"]["body"]["error"]["message"] == failure["error"]["message"]
        assert not fake_model[0].engine._requests

    def test_all_of_them_in_one_file_with_a_bom_and_crlf(self, batch, files):
        good = [line(str(number), f"prompt {number}") for number in range(5)]
        lines = [good[0], b"", *BAD[:9], b"  \t ", good[1], *BAD[9:], *good[2:]]
        write(files[0], *lines)
        files[0].write_bytes(b"\xef\xbb\xbf" + files[0].read_bytes().replace(b"\n", b"\r\n"))
        assert batch().exit_code == 1
        found = records(files[1])
        assert len(found) == len(BAD) + 5
        assert texts(files[1]) == {str(n): answer(f"prompt {n}", 4) for n in range(5)}
        numbers = [record["error"]["line"] for record in found if record["error"] is not None]
        assert sorted(numbers) == [3, 4, 5, 6, 7, 8, 9, 10, 11, 14, *range(15, 24)]

    def test_bad_lines_alone_do_not_load_the_model(self, batch, files, fake_model):
        write(files[0], b"{bad", b"null")
        assert batch().exit_code == 1
        assert len(records(files[1])) == 2
        assert fake_model == []

    def test_a_line_of_5_mb_is_answered_if_it_is_good(self, batch, files):
        write(files[0], {**line("big", "x"), "metadata": "m" * 5_000_000}, line("2", "y"))
        assert batch().exit_code == 0
        assert texts(files[1]) == {"big": answer("x", 4), "2": answer("y", 4)}

    def test_an_empty_file_is_a_finished_job(self, batch, files, fake_model):
        write(files[0], b"", b"\r")
        assert batch().exit_code == 0
        assert fake_model == []
        assert files[1].read_bytes() == b""

    def test_a_directory_is_no_output(self, batch, files):
        write(files[0], line("a", "x"))
        files[1].mkdir()
        result = batch()
        assert result.exit_code == 1
        assert "is a directory; name a file" in result.stderr

    def test_an_unknown_response_template_is_refused_before_loading(self, batch, files, fake_model):
        write(files[0], line("a", "x"))
        result = batch("--response-template", "nope")
        assert result.exit_code == 1
        assert "'nope' is neither a file nor one of auto, none" in result.stderr
        assert fake_model == []


class TestCustomIds:
    """B63."""

    def test_duplicates_are_refused_before_anything_is_run(self, batch, files, fake_model):
        write(files[0], line("a", "x"), line("b", "y"), line("a", "z"), line("a", "w"))
        result = batch()
        assert result.exit_code == 1
        assert "'a' on lines 1, 3, 4" in result.stderr
        assert not files[1].exists()
        assert fake_model == []

    def test_missing_and_numeric_ids_are_told_apart_by_line(self, batch, files):
        write(files[0], line(None, "x"), line(1, "x"), line(1, "y"), line("1", "z"))
        assert batch().exit_code == 1
        found = records(files[1])
        lines = [record["error"]["line"] for record in found if record["error"] is not None]
        assert lines == [1, 2, 3]
        assert texts(files[1]) == {"1": answer("z", 4)}


class TestAnswers:
    def test_a_record_is_openais(self, batch, files):
        write(files[0], line("a", "x"))
        assert batch().exit_code == 0
        (record,) = records(files[1])
        assert record["custom_id"] == "a"
        assert record["id"].startswith("batch_req_")
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        body = record["response"]["body"]
        assert body["object"] == "text_completion"
        assert body["model"] == "fake"
        assert body["usage"]["total_tokens"] == 5

    def test_chat_lines_and_several_prompts(self, batch, files, fake_model):
        messages = [{"role": "user", "content": "hi"}]
        chat = {"custom_id": "c", "url": "/v1/chat/completions"}
        body = {"messages": messages, "max_tokens": 3}
        write(files[0], {**chat, "body": body}, line("p", ["a", "b"], n=2))
        assert batch().exit_code == 0
        by_id = {r["custom_id"]: r["response"]["body"]["choices"] for r in records(files[1])}
        ids = fake_model[0].tokenizer.encode_chat(messages)
        assert by_id["c"][0]["message"]["content"] == answer(ids, 3)
        assert [choice["text"] for choice in by_id["p"]] == [
            answer(prompt, 4, index) for prompt in "ab" for index in (0, 1)
        ]

    def test_equal_bodies_have_unique_response_ids(self, batch, files):
        write(files[0], line("a", "x"), line("b", "x"))
        batch()
        assert len({record["response"]["body"]["id"] for record in records(files[1])}) == 2

    def test_the_served_name_can_be_chosen(self, batch, files):
        write(files[0], line("a", "x", model="mine"))
        assert batch("--served-model-name", "mine").exit_code == 0
        assert records(files[1])[0]["response"]["body"]["model"] == "mine"

    def test_the_engine_holds_a_bounded_number(self, batch, files, fake_model):
        write(files[0], *(line(str(n), f"p{n}") for n in range(40)))
        assert batch("--max-num-seqs", 3).exit_code == 0
        assert fake_model[0].engine.most_samples == 6
        assert len(texts(files[1])) == 40

    def test_a_line_above_the_bound_runs_alone(self, batch, files, fake_model):
        write(files[0], line("a", "x"), line("b", "y", n=50), line("c", "z"))
        assert batch("--max-num-seqs", 1).exit_code == 0
        assert fake_model[0].engine.most_samples == 51
        assert len(texts(files[1])) == 3

    def test_results_appear_as_they_are_made(self, files):
        write(files[0], *(line(str(n), f"p{n}") for n in range(4)))
        llm = FakeLLM(config=EngineConfig(max_num_seqs=1))
        seen = []
        llm.engine.on_step = lambda: seen.append(files[1].read_bytes().count(b"\n"))
        job = BatchJob.open(*files, "fake")
        run_batch(job, lambda: llm, max_in_engine=2)
        assert seen == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4

    def test_a_stop_leaves_the_engine_empty(self, files):
        write(files[0], *(line(str(n), f"p{n}") for n in range(4)))
        llm = FakeLLM(config=EngineConfig(max_num_seqs=1))
        job = BatchJob.open(*files, "fake")
        report = run_batch(
            job, lambda: llm, max_in_engine=2, should_stop=lambda: llm.engine.num_steps == 6
        )
        assert report.interrupted
        assert report.num_answered == 1
        assert not llm.engine._requests


def test_the_user_of_a_line_is_its_key(files):
    write(files[0], line("a", "x", user="alice"), line("b", "y"), line("c", "z", user=None))
    llm = run_with_fake(BatchJob.open(*files, "m"))
    assert llm.engine.keys == ["alice", "", ""]


class TestResume:
    """B64."""

    def test_a_finished_job_is_left_alone(self, batch, files, fake_model):
        write(files[0], line("a", "x"), line("b", "y"))
        assert batch().exit_code == 0
        before = files[1].read_bytes(), files[1].stat().st_mtime_ns
        assert batch("--resume").exit_code == 0
        assert (files[1].read_bytes(), files[1].stat().st_mtime_ns) == before
        assert len(fake_model) == 1

    def test_without_resume_an_output_is_kept(self, batch, files):
        write(files[0], line("a", "x"))
        batch()
        before = files[1].read_bytes()
        result = batch()
        assert result.exit_code == 1
        assert "--resume" in result.stderr
        assert files[1].read_bytes() == before

    def test_resume_needs_no_output(self, batch, files):
        write(files[0], line("a", "x"))
        assert batch("--resume").exit_code == 0
        assert texts(files[1]) == {"a": answer("x", 4)}

    def test_failures_are_retried_and_replaced(self, batch, files, fake_model, monkeypatch):
        write(files[0], line("a", "x"), line("b", "FAIL"), b"{bad")
        assert batch().exit_code == 1
        monkeypatch.setattr(fakes, "FAILING", "nothing fails now")
        write(files[0], line("a", "x"), line("b", "FAIL"), line("c", "z"))
        assert batch("--resume").exit_code == 0
        assert fake_model[1].engine.submitted == ["FAIL", "z"]
        assert texts(files[1]).keys() == {"a", "b", "c"}
        assert len(records(files[1])) == 3
        assert sorted(path.name for path in files[0].parent.iterdir()) == ["in.jsonl", "out.jsonl"]

    def test_only_what_changed_is_computed(self, batch, files, fake_model):
        write(files[0], line("a", "x"), line("b", "y"), line("c", "z"), line("d", "w"))
        batch()
        old = {record["custom_id"]: record for record in records(files[1])}
        reordered = dict(reversed(line("a", "x").items()))
        write(files[0], line("e", "new"), line("c", "changed"), reordered, line("b", "y"))
        assert batch("--resume").exit_code == 0
        assert fake_model[1].engine.submitted == ["new", "changed"]
        assert texts(files[1]) == {
            "a": answer("x", 4),
            "b": answer("y", 4),
            "c": answer("changed", 4),
            "e": answer("new", 4),
        }
        superseded = records(files[1].with_name("out.jsonl.superseded"))
        assert superseded == [old["c"], old["d"]]

    def test_another_models_answers_are_not_taken(self, batch, files, fake_model):
        write(files[0], line("a", "x"))
        batch()
        assert batch("--resume", "--served-model-name", "other").exit_code == 0
        assert records(files[1])[0]["response"]["body"]["model"] == "other"
        assert len(records(files[1])) == 1

    def test_a_cut_at_any_byte_costs_the_cut_line_alone(self, files):
        """What a kill leaves is a prefix of the file; every 7th byte and every line end."""
        write(files[0], *(line(str(n), f"p{n}") for n in range(3)))
        run_with_fake(BatchJob.open(*files, "fake"))
        whole = files[1].read_bytes()
        ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
        for cut in sorted({*range(0, len(whole), 7), *ends, *(end + 1 for end in ends)}):
            files[1].write_bytes(whole[:cut])
            llm = run_with_fake(BatchJob.open(*files, "fake", resume=True))
            num_whole = sum(end <= cut for end in ends)
            assert llm.engine.submitted == [f"p{n}" for n in range(num_whole, 3)], cut
            assert texts(files[1]) == {str(n): answer(f"p{n}", 4) for n in range(3)}

    def test_permissions_and_links_survive_the_cleaning(self, batch, files):
        write(files[0], line("a", "FAIL"), line("b", "x"))
        real = files[1].with_name("real.jsonl")
        files[1].symlink_to(real)
        batch()
        real.chmod(0o640)
        write(files[0], line("b", "x"), line("c", "y"))
        assert batch("--resume").exit_code == 0
        assert files[1].is_symlink()
        assert real.stat().st_mode & 0o777 == 0o640
        assert texts(real).keys() == {"b", "c"}


class TestSignals:
    """B64 with a process of its own; the log says what it submitted."""

    @pytest.fixture
    def start(self, files, tmp_path):
        def call(*arguments, step_s=0.02):
            root = Path(__file__).parents[2]
            return subprocess.Popen(
                [
                    *(sys.executable, root / "tests/cli/fake_jaxserve.py", "run-batch"),
                    *("-i", files[0], "-o", files[1], "--max-num-seqs", "2", *arguments),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": str(root),
                    "FAKE_STEP_S": str(step_s),
                    "FAKE_LOG": str(tmp_path / "log"),
                },
                stderr=subprocess.PIPE,
                text=True,
            )

        return call

    @pytest.mark.parametrize(
        ("signum", "code"),
        [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
    )
    def test_interrupted_and_resumed(self, start, files, tmp_path, signum, code):
        write(files[0], *(line(str(n), f"p{n}") for n in range(100)))
        with start() as process:
            _wait_for(lambda: _num_lines(files[1]) >= 3, process)
            process.send_signal(signum)
            stderr = process.communicate(timeout=30)[1]
        assert process.returncode == code
        if signum != signal.SIGKILL:
            assert "continue with --resume" in stderr
        done = {record["custom_id"] for record in records(files[1])[: _num_lines(files[1])]}
        assert 3 <= len(done) < 100

        (tmp_path / "log").unlink()
        with start("--resume", step_s=0) as process:
            assert process.wait(timeout=30) == 0
        again = Counter((tmp_path / "log").read_text().split())
        assert again == Counter(f"p{n}" for n in range(100) if str(n) not in done)
        assert texts(files[1]) == {str(n): answer(f"p{n}", 4) for n in range(100)}


def _num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _wait_for(condition, process):
    deadline = time.monotonic() + 30
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)

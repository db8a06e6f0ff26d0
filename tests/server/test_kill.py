"""Kill -9 while a batch file runs: the resumed run gives every line exactly one answer.

Three processes can be killed: the batch process with its own engine, the batch process that asks
a server, and that server.  What is answered does not depend on which of them it was.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import ROOT, SMALL, ServerProcess

NUM_LINES = 60
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
KILL_AFTER = 3
"""Lines that must have an answer before the kill."""


def line(number: int) -> dict[str, Any]:
    text = f"line {number}"
    url = ENDPOINTS[number % 2]
    asked = {"prompt": text} if number % 2 == 0 else {"messages": [message(text)]}
    body = {**asked, "max_tokens": 120, "temperature": 0.9, "seed": number, "ignore_eos": True}
    return {"custom_id": f"{number}", "method": "POST", "url": url, "body": body}


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line(number)) + "\n" for number in range(NUM_LINES)))
    return path


@pytest.fixture
def start(source: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `jaxserve run-batch`; whatever still runs at the end is killed."""
    processes: list[subprocess.Popen[str]] = []

    def call(*flags: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "jaxserve", "run-batch", "-i", str(source)]
        process = subprocess.Popen(
            [*command, "-o", str(tmp_path / "out.jsonl"), *map(str, flags)],
            cwd=ROOT,
            env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield call
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def offline_flags(model_directory: Path, server_cache: Path) -> list[Any]:
    flags = {**SMALL, "--model": model_directory, "--cache-dir": server_cache}
    return [part for pair in flags.items() for part in pair]


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> dict[str, str]:
    """The answers, asked one by one."""
    with server.client() as client:
        found = {}
        for number in range(NUM_LINES):
            asked = line(number)
            response = client.post(asked["url"], json=asked["body"])
            found[asked["custom_id"]] = text_of(response.json())
    assert len(set(found.values())) == NUM_LINES  # a mixed-up line would be seen
    return found


def text_of(body: dict[str, Any]) -> str:
    (choice,) = body["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def num_answers(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_answers(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while num_answers(path) < KILL_AFTER:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.005)


def check_left(path: Path) -> int:
    """The answers that a kill left, of which there must be some but not all."""
    num_left = num_answers(path)
    assert KILL_AFTER <= num_left < NUM_LINES
    return num_left


def check_whole(path: Path, expected: dict[str, str]) -> None:
    records = [json.loads(record) for record in path.read_text().splitlines()]
    assert sorted(record["custom_id"] for record in records) == sorted(expected)
    assert all(record["error"] is None for record in records)
    texts = {record["custom_id"]: text_of(record["response"]["body"]) for record in records}
    assert texts == expected


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a run that must succeed; what it said."""
    _, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    return log


def test_the_batch_process_with_its_own_engine(start, offline_flags, tmp_path, expected):
    out = tmp_path / "out.jsonl"
    process = start(*offline_flags)
    wait_for_answers(out, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    num_left = check_left(out)
    log = finish(start(*offline_flags, "--resume"))
    assert f"{NUM_LINES} of {NUM_LINES} lines answered, {num_left} of them before" in log
    check_whole(out, expected)


def test_the_batch_process_that_asks_a_server(start, server, tmp_path, expected):
    out = tmp_path / "out.jsonl"
    process = start("--url", server.url, "--concurrency", 2)
    wait_for_answers(out, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    num_left = check_left(out)
    log = finish(start("--url", server.url, "--resume"))
    assert f"{NUM_LINES} of {NUM_LINES} lines answered, {num_left} of them before" in log
    check_whole(out, expected)


def test_the_server(start, model_directory, server_cache, server, tmp_path, expected):
    out = tmp_path / "out.jsonl"
    with ServerProcess(model_directory, cache=server_cache) as doomed:
        process = start("--url", doomed.url, "--concurrency", 2, "--patience", 0.5)
        wait_for_answers(out, process)
        doomed.send(signal.SIGKILL)
        doomed.wait()
        _, log = process.communicate(timeout=120)
    assert process.returncode == 1, log
    check_left(out)
    finish(start("--url", server.url, "--resume"))
    check_whole(out, expected)

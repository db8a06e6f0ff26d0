"""The examples run: those of few tokens with the tiny model, all of them with the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.demo import demo_source
from tests.server.process import ROOT, ServerProcess

PROMPTS = ROOT / "examples" / "prompts.txt"


def run_example(name: str, *arguments: Any) -> list[str]:
    """The lines that an example prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def check_openai_client(url: str) -> None:
    lines = "\n".join(run_example("openai_client.py", "--url", f"{url}/v1"))
    whole = lines.partition("whole: ")[2].partition("\nusage: ")[0]
    streamed = lines.partition("stream: ")[2].partition("\nsample 0: ")[0]
    assert whole == repr(streamed)
    assert all(f"sample {index}: " in lines for index in range(3))
    assert lines.count("first token ") == 3


def check_batch_inference(url: str, directory: Path) -> None:
    answers = directory / "answers.txt"
    command = ("batch_inference.py", PROMPTS, answers, "--url", url, "--max-tokens", 8)
    assert run_example(*command) == [f"12 answers: {answers}"]
    first = answers.read_bytes()
    assert len([json.loads(line) for line in first.splitlines()]) == 12
    run_example(*command)  # done already: nothing is asked again
    assert answers.read_bytes() == first


def test_openai_client(server: ServerProcess) -> None:
    check_openai_client(server.url)


def test_batch_inference(server: ServerProcess, tmp_path: Path) -> None:
    check_batch_inference(server.url, tmp_path)


@pytest.fixture(scope="module")
def demo_url(server_cache: Path) -> Iterator[str]:
    flags = (
        *("--dtype", "bfloat16", "--cpu-kernels", "auto"),
        *("--max-model-len", 1024, "--block-size", 64, "--num-kv-blocks", 64),
    )
    with ServerProcess(demo_source().path, *flags, cache=server_cache) as process:
        yield process.url


@pytest.mark.slow
class TestDemoModel:
    def test_openai_client(self, demo_url: str) -> None:
        check_openai_client(demo_url)

    def test_batch_inference(self, demo_url: str, tmp_path: Path) -> None:
        check_batch_inference(demo_url, tmp_path)

    def test_structured_extraction(self, demo_url: str) -> None:
        lines = run_example("structured_extraction.py", "--url", f"{demo_url}/v1")
        assert len(lines) == 6
        assert all(line.startswith("name=") for line in lines[:3])
        assert set(lines[3:]) <= {"computing", "physics", "mathematics"}

    def test_tool_loop(self, demo_url: str) -> None:
        lines = run_example("tool_loop.py", "--url", f"{demo_url}/v1")
        assert lines[0].startswith("call: stock(")
        assert lines[-1].startswith("answer: ")

    def test_async_batch(self) -> None:
        lines = run_example("async_batch.py", "--max-tokens", 8)
        assert len(lines) == len(PROMPTS.read_text().splitlines()) + 1
        assert lines[-1].startswith("left early: ")

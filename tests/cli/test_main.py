"""The command as a whole: what it imports, where it writes, how it fails."""

import logging
import subprocess
import sys

import pytest

from jaxserve.cli import main
from jaxserve.cli.base import _EchoHandler

VERBS = [
    ("serve",),
    ("generate",),
    ("chat",),
    ("score",),
    ("run-batch",),
    ("bench",),
    ("bench", "throughput"),
    ("bench", "sweep"),
    ("bench", "serve"),
    ("simulate",),
    ("plot",),
    ("tune",),
    ("convert",),
    ("inspect",),
    ("fetch",),
    ("collect-env",),
]


def test_help_of_any_verb_imports_no_jax():
    code = f"""
import sys
from click.testing import CliRunner
from jaxserve.cli import main
for verb in {[(), *VERBS]}:
    result = CliRunner().invoke(main, [*verb, "--help"])
    assert result.exit_code == 0, result.output
slow = {{"jax", "numpy", "transformers", "tokenizers", "flax"}} & sys.modules.keys()
assert not slow, slow
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_lists_every_verb(jaxserve_cli):
    shown = jaxserve_cli("--help").stdout
    assert all(verb[0] in shown for verb in VERBS)


def test_unknown_verb_is_wrong_usage(jaxserve_cli):
    result = jaxserve_cli("serv")
    assert result.exit_code == 2
    assert "serv" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--temperature", "-1"], ["temperature=-1.0", "[0,"]),
        (["generate", "x", "--max-num-seqs", "0"], ["max_num_seqs=0", "at least 1"]),
        (["generate", "x", "--prompt-file", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["generate", "x" * 500], ["500 tokens", "at most 199"]),
        (["generate", "x", "y" * 500], ["prompt 2", "500 tokens"]),
        (["generate", "x", "--top-k", "5", "--min-tokens", "99"], ["min_tokens=99"]),
        (["generate", "--logit-bias", "999=1", "x"], ["logit_bias", "999", "300"]),
        (["score"], ["no prompt"]),
        (["chat", "-n", "2"], ["n=2"]),
        (["run-batch", "-i", "/nowhere/in", "-o", "/nowhere/out"], ["/nowhere/in"]),
        (["bench", "throughput", "--workload", "/nowhere/at/all"], ["/nowhere/at/all"]),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_1(jaxserve_cli, arguments, words):
    result = jaxserve_cli(*arguments, stdin="")
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert all(word in line for word in words), line


def test_a_message_of_several_lines_becomes_one(jaxserve_cli, monkeypatch, fake_model):
    def load(config):
        raise ValueError("first\n  second")

    monkeypatch.setattr("jaxserve.cli.generate.load_llm", load)
    result = jaxserve_cli("generate", "x")
    assert result.stderr == "Error: first second\n"


def test_a_bug_is_not_disguised_as_bad_input(jaxserve_cli, monkeypatch):
    def load(config):
        raise RuntimeError("a bug")

    monkeypatch.setattr("jaxserve.cli.generate.load_llm", load)
    assert isinstance(jaxserve_cli("generate", "x").exception, RuntimeError)


def test_ctrl_c_is_exit_code_130(jaxserve_cli, monkeypatch):
    def load(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxserve.cli.generate.load_llm", load)
    result = jaxserve_cli("generate", "x")
    assert result.exit_code == 130
    assert result.stderr == ""


def test_log_lines_go_to_stderr_at_the_level_asked(jaxserve_cli, monkeypatch):
    def load(config):
        logging.getLogger("jaxserve.somewhere").info("loading")
        raise ValueError("enough")

    monkeypatch.setattr("jaxserve.cli.generate.load_llm", load)
    assert "loading" in jaxserve_cli("generate", "x").stderr
    assert "loading" not in jaxserve_cli("generate", "x", "--log-level", "warning").stderr
    traced = jaxserve_cli("generate", "x", "--log-level", "debug")
    assert "Traceback" in traced.stderr
    assert traced.stdout == ""


def test_the_entry_point_is_the_group():
    assert main.name == "main"
    done = subprocess.run(
        [sys.executable, "-m", "jaxserve", "--help"], check=True, capture_output=True, text=True
    )
    assert done.stdout.startswith("Usage: jaxserve ")


def test_a_log_line_that_nobody_can_read_any_more_is_no_error(monkeypatch):
    def broken(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("jaxserve.cli.base.click.echo", broken)
    _EchoHandler().handle(logging.makeLogRecord({"msg": "lost"}))

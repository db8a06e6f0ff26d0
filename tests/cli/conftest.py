import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import jaxserve.loading.source
from tests.cli.fakes import FakeLLM


@pytest.fixture
def fake_model(monkeypatch):
    """Let the verbs load a fake; gives the list of those that were loaded."""
    monkeypatch.setattr(FakeLLM, "created", [])
    monkeypatch.setitem(sys.modules, "jaxserve.llm", SimpleNamespace(LLM=FakeLLM))
    monkeypatch.setattr(jaxserve.loading.source, "locate", lambda *_: (None, None, "fake"))
    return FakeLLM.created


@pytest.fixture
def jaxserve_cli(fake_model):
    """Call `jaxserve ...` in this process."""
    from jaxserve.cli import main

    def call(*arguments, stdin=None, env=None):
        return CliRunner().invoke(main, [str(a) for a in arguments], input=stdin, env=env)

    return call

"""The programs that put load on a server for long, in a shorter form (B45, B47)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import overload, soak
from tests.demo import demo_source

pytestmark = pytest.mark.slow


def run(monkeypatch: pytest.MonkeyPatch, main, *arguments: object) -> int:
    model = demo_source().path
    monkeypatch.setattr(sys, "argv", ["program", "--model", str(model), *map(str, arguments)])
    return main()


def test_soak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    arguments = ("--minutes", 2, "--round-s", 10, "--json", report)
    assert run(monkeypatch, soak.main, *arguments) == 0, report.read_text()


def test_overload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = tmp_path / "overload.json"
    assert run(monkeypatch, overload.main, "--json", report) == 0, report.read_text()

"""Kernels that cannot be had: no compiler, no such CPU, a damaged cache.  Never a crash."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from jaxserve.files import cache_directory
from jaxserve.weights import load_cpu_kernels
from pallas_kernels import cpu
from pallas_kernels.cpu import build, instructions, library
from pallas_kernels.cpu.instructions import InstructionSet

PLAIN = InstructionSet("plain_for_tests", ("avx2", "fma", "f16c"))
"""Not one of those that the process has loaded already."""


@pytest.fixture(autouse=True)
def can_build() -> None:
    if PLAIN.missing():
        pytest.skip("this CPU has no AVX2")
    build.find_compiler()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.library(PLAIN, tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    """A directory of its own with the library in it."""
    path = tmp_path / built.name
    path.write_bytes(built.read_bytes())
    return path


def test_a_built_library_is_found_again(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build.library(PLAIN, copied.parent) == copied


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_library_is_built_anew(copied: Path, built: Path, damage: str) -> None:
    intact = built.read_bytes()
    flipped = bytearray(intact)
    flipped[len(flipped) // 2] ^= 1
    content = {"truncated": intact[: len(intact) // 2], "flipped": bytes(flipped), "empty": b""}
    copied.write_bytes(content[damage])
    assert not build._intact(copied)
    path = build.library(PLAIN, copied.parent)
    assert build._intact(path)
    assert len(path.read_bytes()) == len(intact)


def test_an_intact_file_that_does_not_load_is_refused(copied: Path) -> None:
    import hashlib

    code = b"not a shared library"
    copied.write_bytes(code + build._MAGIC + hashlib.sha256(code).hexdigest().encode())
    with pytest.raises(cpu.Unavailable, match="does not load"):
        library.load(PLAIN, copied.parent)
    assert not cpu.is_loaded(PLAIN.name)


def test_another_compiler_or_source_is_another_library(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = build.find_compiler()
    before = build._key(compiler, PLAIN)
    assert before in built.name
    source = tmp_path / "src"
    source.mkdir()
    for file in build.SOURCE.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(build, "SOURCE", source)
    assert build._key(compiler, PLAIN) == before
    (source / "ops.cc").write_bytes((source / "ops.cc").read_bytes() + b"\n")
    assert build._key(compiler, PLAIN) != before


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "src"
    source.mkdir()
    (source / "ops.cc").write_text("#error these kernels are broken\n")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(cpu.Unavailable, match="these kernels are broken"):
        build.library(PLAIN, tmp_path)
    assert not list(tmp_path.glob("*.so"))


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(cpu.Unavailable, match="cannot be built in"):
        build.library(PLAIN, file / "below")


def test_features_decide_what_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "cpu_features", lambda: frozenset({"avx2", "fma", "f16c"}))
    names = [known.name for known in cpu.best_first() if not known.missing()]
    assert names == ["avx2"]
    with pytest.raises(ValueError, match="no CPU kernels for 'sse2'; known are amx"):
        cpu.instruction_set("sse2")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load_cpu_kernels("auto", tmp_path / "kernels") is None
    (line,) = warnings_of(caplog)
    assert "no C++ compiler" in line
    assert "XLA serves instead" in line


def test_on_another_cpu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(instructions, "cpu_features", lambda: frozenset({"sse4_2"}))
    monkeypatch.setattr(library, "_loaded", {})
    with caplog.at_level(logging.WARNING):
        assert load_cpu_kernels("auto", tmp_path) is None
    (line,) = warnings_of(caplog)
    assert "this CPU has no avx2, fma, f16c" in line


def test_masked_features_fall_to_the_next_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the widest instructions the next ones serve, and no line is needed."""
    monkeypatch.setattr(instructions, "cpu_features", lambda: frozenset({"avx2", "fma", "f16c"}))
    assert load_cpu_kernels("auto", cache_directory(None) / "kernels") == "avx2"


def test_a_better_set_that_cannot_be_had_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one serves, and one line says what is missing for more."""
    load = cpu.load

    def refuse_the_best(known: InstructionSet, directory: Path) -> None:
        if known.name != "avx2":
            raise cpu.Unavailable("the operating system does not allow their instructions")
        load(known, directory)

    best = InstructionSet("best_for_tests", ())
    sets = (best, cpu.instruction_set("avx2"))
    monkeypatch.setattr(cpu, "best_first", lambda: sets)
    monkeypatch.setattr(cpu, "load", refuse_the_best)
    with caplog.at_level(logging.WARNING):
        assert load_cpu_kernels("auto", cache_directory(None) / "kernels") == "avx2"
    (line,) = warnings_of(caplog)
    assert "avx2 serves, as best_for_tests cannot be had: the operating system" in line


def test_off_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_cpu_kernels("off", tmp_path) is None
    assert not caplog.records

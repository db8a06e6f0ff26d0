from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxserve.weight_cache import WeightCache

TREE = {("a",): np.arange(6, dtype=np.float32), ("layers", 0, "b"): np.ones((2, 3), np.int8)}


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def cache(directory: Path, origin: Path, name: str = "m-float32-x", version: str = "1"):
    return WeightCache(directory, name, [origin], version)


def read(entry: WeightCache):
    return entry.read(lambda size: np.empty(size, np.uint8), lambda path, leaf: leaf)


def test_kept_until_something_changes(tmp_path, origin):
    entry = cache(tmp_path / "c", origin)
    assert read(entry) is None
    entry.write(TREE.items())
    again = read(cache(tmp_path / "c", origin))
    assert (again["a"] == TREE["a",]).all()
    assert (again["layers"][0]["b"] == 1).all()
    assert read(cache(tmp_path / "c", origin, version="2")) is None
    assert read(cache(tmp_path / "c", origin, name="m-float32-y")) is None
    os.utime(origin, ns=(1, 1))
    assert read(cache(tmp_path / "c", origin)) is None


def test_a_new_version_replaces_the_old_one_and_nothing_else(tmp_path, origin):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"weights")
    kept = [cache(tmp_path / "c", origin, name="m-float32-y"), cache(tmp_path / "c", other)]
    old = cache(tmp_path / "c", origin)
    for entry in (*kept, old):
        entry.write(TREE.items())
    new = cache(tmp_path / "c", origin, version="2")
    new.write(TREE.items())
    assert sorted((tmp_path / "c").iterdir()) == sorted(e.path for e in (*kept, new))


@pytest.mark.parametrize("damage", ["truncated", "flipped", "renamed", "empty", "directory"])
def test_a_bad_file_is_reported_and_replaced(tmp_path, origin, caplog, damage):
    entry = cache(tmp_path / "c", origin)
    entry.write(TREE.items())
    content = entry.path.read_bytes()
    flipped = bytearray(content)
    flipped[64] ^= 1
    if damage == "renamed":
        old = cache(tmp_path / "d", origin, version="0")
        old.write(TREE.items())
        content = old.path.read_bytes()
    entry.path.unlink()
    if damage == "directory":
        entry.path.mkdir()
    else:
        changed = {"truncated": content[:-9], "flipped": flipped, "renamed": content, "empty": b""}
        entry.path.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        assert read(entry) is None
    (record,) = caplog.records
    assert record.message.startswith(f"making the weights anew: {entry.path} cannot be used: ")
    if damage != "directory":
        entry.write(TREE.items())
        assert read(entry) is not None


@pytest.mark.parametrize("obstacle", ["file", "read-only", "full"])
def test_what_cannot_be_written_is_served_all_the_same(
    tmp_path, origin, caplog, monkeypatch, obstacle
):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Read-only file system", str(path))

    directory = tmp_path / "c"
    entry = cache(directory, origin)
    leaves = TREE.items()
    if obstacle == "file":
        directory.write_text("in the way")
    elif obstacle == "read-only":
        directory.mkdir()
        monkeypatch.setattr(Path, "open", refuse)
    else:

        def leaves_until_full():
            yield next(iter(TREE.items()))
            raise OSError(28, "No space left on device")

        leaves = leaves_until_full()
    with caplog.at_level(logging.WARNING):
        entry.write(leaves)
    (record,) = caplog.records
    assert record.message.startswith("not keeping the weights for the next start: ")
    assert not directory.is_dir() or list(directory.iterdir()) == []
    monkeypatch.undo()
    assert read(entry) is None


def test_an_unreadable_directory_is_an_empty_one(tmp_path, origin, caplog):
    (tmp_path / "c").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert read(cache(tmp_path / "c", origin)) is None
    assert "cannot be used" in caplog.text


def test_a_writer_never_disturbs_a_reader_or_another_writer(tmp_path, origin):
    def work(number: int) -> bool:
        entry = cache(tmp_path / "c", origin)
        if number % 2:
            entry.write(TREE.items())
            return True
        tree = read(entry)
        return tree is None or bool((tree["a"] == TREE["a",]).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert [p.suffix for p in (tmp_path / "c").iterdir()] == [".weights"]
    assert read(cache(tmp_path / "c", origin)) is not None

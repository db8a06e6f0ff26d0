from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxserve.weight_file import MAGIC, DamagedError, WeightWriter, read_weights
from tests.loading.tiny import flat

KEY = "of this model"


@dataclass(frozen=True)
class Blocks:
    """A packed weight, as a backend may define one."""

    data: np.ndarray
    scale: np.ndarray | None
    kernels: str
    shape: tuple[int, ...]
    transposed: bool
    inner: Any = None


def leaves() -> dict[tuple[str | int, ...], Any]:
    generator = np.random.default_rng(0)
    matrix = generator.standard_normal((7, 5), np.float32)
    bytes_ = generator.integers(-128, 128, (3, 2, 4), np.int8)
    return {
        ("embed",): matrix.astype(ml_dtypes.bfloat16),
        ("layers", 0, "attn", "qkv"): Blocks(
            bytes_, matrix[:, 0], "avx", (3, 8), True, Blocks(matrix.T, None, "", (), False)
        ),
        ("layers", 0, "norm"): matrix[0],
        ("layers", 1, "norm"): matrix[1].astype(np.float16),
        ("large",): generator.integers(0, 256, 3 << 20, np.uint8),
        ("nothing",): np.zeros((0, 4), np.float32),
        ("scalar",): np.array(2.5),
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path / "w")


def written(path: Path) -> Path:
    with path.open("wb") as file:
        writer = WeightWriter(file, KEY)
        for where, leaf in leaves().items():
            writer.add(where, leaf)
        writer.finish()
    return path


def allocate(size: int) -> np.ndarray:
    return np.full(size, 99, np.uint8)


def read(path: Path, key: str = KEY, place=lambda path, leaf: leaf) -> dict[str, Any]:
    return read_weights(path, key, allocate, place)


def assert_same(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    if isinstance(want, np.ndarray):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()
    elif isinstance(want, Blocks):
        for name in want.__dataclass_fields__:
            assert_same(getattr(got, name), getattr(want, name))
    else:
        assert got == want


def test_what_is_read_is_what_was_written(file: Path) -> None:
    got = flat(read(file))
    assert got.keys() == leaves().keys()
    for path, want in leaves().items():
        assert_same(got[path], want)


def test_every_array_is_aligned_for_use_in_place(file: Path) -> None:
    raw = file.read_bytes()
    index = json.loads(raw[raw.index(b'{"key"') : raw.rindex(b"}") + 1])
    offsets = [e["leaf"]["offset"] for e in index["leaves"] if "offset" in e["leaf"]]
    assert len(offsets) == 6
    assert all(offset % 64 == 0 for offset in offsets)


def test_leaves_are_placed_as_they_come_with_their_path(file: Path) -> None:
    seen = {}

    def place(path, leaf):
        seen[path] = threading.get_ident()
        return path

    assert flat(read(file, place=place)) == {path: path for path in leaves()}
    assert seen.keys() == leaves().keys()
    assert threading.get_ident() not in seen.values()


def test_every_truncation_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    for size in (0, 1, len(MAGIC), 1000, len(whole) // 2, len(whole) - len(MAGIC), len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(DamagedError):
            read(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(DamagedError):
        read(file)


def test_every_flipped_byte_that_matters_is_noticed(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    want = flat(read(file))
    generator = np.random.default_rng(0)
    tail = range(len(whole) - 400, len(whole))
    noticed = 0
    for place in [*generator.integers(len(MAGIC), len(whole), 60).tolist(), *tail]:
        damaged = whole.copy()
        damaged[place] ^= 0x10
        file.write_bytes(damaged)
        try:
            got = flat(read(file))
        except DamagedError:
            noticed += 1
        else:  # a byte between two arrays
            for path, leaf in want.items():
                assert_same(got[path], leaf)
    assert noticed >= 450


def test_zeroed_pages_are_noticed(file: Path) -> None:
    """What a power failure leaves of a file that was renamed before it was on the disk."""
    whole = bytearray(file.read_bytes())
    whole[1 << 20 : 1 << 20 | 4096] = bytes(4096)
    file.write_bytes(whole)
    with pytest.raises(DamagedError, match="its data are damaged"):
        read(file)


def test_another_key_is_another_file(file: Path) -> None:
    with pytest.raises(DamagedError, match="belongs to something else"):
        read(file, key="of that model")


def test_a_class_is_not_imported_because_a_file_says_so(tmp_path: Path) -> None:
    @dataclass
    class Local:
        array: np.ndarray

    with (tmp_path / "w").open("wb") as file:
        writer = WeightWriter(file, KEY)
        writer.add(("x",), Local(np.zeros(3)))
        writer.finish()
    with pytest.raises(DamagedError, match="does not exist here"):
        read(tmp_path / "w")


def test_a_missing_file_is_not_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "w")


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    with (tmp_path / "w").open("wb") as file:
        writer = WeightWriter(file, KEY)
        with pytest.raises(TypeError, match=r"a weight holds \{'a': 1\} of type dict"):
            writer.add(("x",), Blocks(np.zeros(3), None, {"a": 1}, (), False))  # type: ignore[arg-type]


def test_an_error_of_placing_is_raised_and_ends_the_reading(file: Path) -> None:
    def place(path, leaf):
        raise OSError("no memory on the device")

    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(OSError, match="no memory on the device"):
        read(file, place=place)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before

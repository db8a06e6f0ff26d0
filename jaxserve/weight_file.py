"""One flat file of weights: arrays at aligned offsets, then an index, then where the index is.

Leaves of the tree are arrays, or dataclasses of arrays and plain values (a packed weight is its
blocks and their sizes).  Every array and the index carry a CRC-32, checked while reading.  Does
not know which weights these are, nor where arrays are placed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxserve.host_memory import ALIGNMENT

Array = npt.NDArray[Any]
TreePath = tuple[str | int, ...]
Place = Callable[[TreePath, Any], Any]
"""Given a path and a leaf of host arrays, returns what the tree shall hold."""
Allocate = Callable[[int], npt.NDArray[np.uint8]]
"""Gives a number of bytes to read into."""

MAGIC = b"jaxserve weights 1\n"
_FOOTER = struct.Struct("<QQI")
_PIECE = 1 << 20
"""Bytes read and checked at once: few enough to be in a cache for the check."""
_THREADS = 4


class DamagedError(ValueError):
    """The file is truncated, changed, or not of this kind; says how it was noticed."""


class WeightWriter:
    """Writes a file leaf by leaf; `finish` makes it readable.

    Args:
        file: open for writing, at its beginning.
        key: text that a reader must give, too.
    """

    def __init__(self, file: BinaryIO, key: str) -> None:
        self._file = file
        self._key = key
        self._leaves: list[dict[str, Any]] = []
        self._offset = file.write(MAGIC)

    def add(self, path: TreePath, leaf: Any) -> None:
        """Append a leaf.

        Raises:
            OSError: it cannot be written.
            TypeError: the leaf holds something other than arrays and plain values.
        """
        self._leaves.append({"path": list(path), "leaf": self._encode(leaf)})

    def finish(self) -> None:
        """Append the index."""
        index = json.dumps({"key": self._key, "leaves": self._leaves}).encode()
        footer = _FOOTER.pack(self._offset, len(index), zlib.crc32(index))
        self._file.write(index + footer + MAGIC)

    def _encode(self, value: Any) -> dict[str, Any]:
        if isinstance(value, np.ndarray):
            return self._append(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kind = type(value)
            fields = {
                f.name: self._encode(getattr(value, f.name)) for f in dataclasses.fields(kind)
            }
            return {"module": kind.__module__, "type": kind.__qualname__, "fields": fields}
        return {"value": _checked_plain(value)}

    def _append(self, array: Array) -> dict[str, Any]:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._offset += self._file.write(bytes(-self._offset % ALIGNMENT))
        entry = {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "offset": self._offset,
            "crc32": zlib.crc32(data),
        }
        self._offset += self._file.write(data)
        return entry


def read_weights(path: Path, key: str, allocate: Allocate, place: Place) -> dict[str, Any]:
    """Read a file into a nested dict, several leaves at a time.

    Args:
        path: of the file.
        key: what it was written with.
        allocate: called for each array, from several threads.
        place: called for each leaf once it is read and checked, from several threads.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        DamagedError: it does not hold what was written, or was written with another key.
    """
    with path.open("rb", buffering=0) as file:
        entries = _read_index(file, key)
        reader = _LeafReader(file.fileno(), allocate)

        def read(entry: Mapping[str, Any]) -> tuple[TreePath, Any]:
            where = tuple(entry["path"])
            return where, place(where, reader.leaf(entry["leaf"]))

        pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "weights")
        try:
            return _nested(pool.map(read, entries))
        finally:
            pool.shutdown(cancel_futures=True)


def _read_index(file: Any, key: str) -> list[Mapping[str, Any]]:
    size = os.fstat(file.fileno()).st_size
    tail = _FOOTER.size + len(MAGIC)
    footer = _read_bytes(file, size - tail, tail) if size > tail else b""
    if not footer.endswith(MAGIC):
        raise DamagedError("its end is missing")
    offset, length, crc = _FOOTER.unpack_from(footer)
    if offset + length + tail != size:
        raise DamagedError("its length is wrong")
    text = _read_bytes(file, offset, length)
    if zlib.crc32(text) != crc:
        raise DamagedError("its index is damaged")
    index = json.loads(text)
    if index["key"] != key:
        raise DamagedError("it belongs to something else")
    leaves: list[Mapping[str, Any]] = index["leaves"]
    return leaves


def _read_bytes(file: Any, offset: int, length: int) -> bytes:
    return os.pread(file.fileno(), length, offset)


class _LeafReader:
    """Decodes leaves of one file."""

    def __init__(self, descriptor: int, allocate: Allocate) -> None:
        self._descriptor = descriptor
        self._allocate = allocate

    def leaf(self, entry: Mapping[str, Any]) -> Any:
        if "fields" in entry:
            kind = _known_dataclass(entry["module"], entry["type"])
            if entry["fields"].keys() != {field.name for field in dataclasses.fields(kind)}:
                raise DamagedError(f"its {entry['type']} has other fields")
            return kind(**{name: self.leaf(value) for name, value in entry["fields"].items()})
        if "value" in entry:
            return _tuples(entry["value"])
        return self._array(entry)

    def _array(self, entry: Mapping[str, Any]) -> Array:
        dtype, shape = _dtype(entry["dtype"]), tuple(entry["shape"])
        raw = self._allocate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        crc = 0
        for start in range(0, raw.size, _PIECE):
            piece = raw[start : start + _PIECE].data
            if os.preadv(self._descriptor, [piece], entry["offset"] + start) != len(piece):
                raise DamagedError("it ends early")
            crc = zlib.crc32(piece, crc)
        if crc != entry["crc32"]:
            raise DamagedError("its data are damaged")
        return raw.view(dtype).reshape(shape)


def _nested(leaves: Iterator[tuple[TreePath, Any]]) -> dict[str, Any]:
    tree: dict[Any, Any] = {}
    for path, leaf in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _known_dataclass(module: str, name: str) -> type:
    """A class that is imported already: a file must not decide what gets imported."""
    kind = getattr(sys.modules.get(module), name, None)
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise DamagedError(f"it holds {module}.{name}, which does not exist here")
    return kind


def _checked_plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_checked_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a weight holds {value!r} of type {type(value).__name__}; not a plain value")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

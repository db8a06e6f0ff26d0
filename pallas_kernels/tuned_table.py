"""Tables of measured sizes: a JSON file per device that a tuner writes and start-up reads.

    {"entries": [{"device_kind": "NVIDIA H200", "op": "decode", "head_dim": 128, "group": 4,
                  "page_size": 16, "cell_dtype": "bfloat16", "query_rows": 1, "block_kv": 64,
                  "chunk_kv": 256, "num_warps": 4, "num_stages": 3, "microseconds": 61.9}]}

The first six keys say what was measured and the next five are the sizes.  `query_rows` is the
query tokens of a work item times the query heads per KV head, so that one entry serves every
ratio of heads that is filed under it; `microseconds` is for people.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pallas_kernels.tuning import Launch, Tuned, group_bucket, power_of_two

OPS = ("decode", "prefill")
CELL_DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")


@dataclass(frozen=True, order=True)
class Key:
    """What an entry was measured for."""

    device_kind: str
    op: str
    """"decode" or "prefill"."""
    head_dim: int
    group: int
    """`group_bucket` of the query heads per KV head."""
    page_size: int
    cell_dtype: str


@dataclass(frozen=True)
class Entry:
    """The sizes that were fastest."""

    query_rows: int
    """Rows of the query block: query tokens times query heads per KV head."""
    block_kv: int
    chunk_kv: int | None
    """Keys of a work item; `None` for prefill."""
    num_warps: int
    num_stages: int
    microseconds: float | None = None
    """What a call took, if it is known."""

    def tuned(self, op: str, group: int) -> Tuned:
        """The sizes of a call with `group` query heads per KV head."""
        block_q = 1 if op == "decode" else max(1, self.query_rows // group)
        return Tuned(block_q, self.block_kv, self.chunk_kv, Launch(self.num_warps, self.num_stages))


@dataclass(frozen=True)
class TunedTable:
    """Measured sizes by key."""

    entries: Mapping[Key, Entry] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> TunedTable:
        """Read a table.

        Raises:
            ValueError: something in the file is no table; names the file, the key and the value.
            OSError: it cannot be read.
        """
        file = Path(path)
        entries: dict[Key, Entry] = {}
        for key, entry in _read(file):
            if key in entries:
                raise ValueError(f"{str(file)!r} has two entries for {key}")
            entries[key] = entry
        return cls(entries)

    @classmethod
    def of_device(cls, directory: str | Path, device_kind: str) -> TunedTable:
        """The table of a device in a directory of tables; an empty one if there is none.

        Raises:
            ValueError: as `read`.
        """
        path = Path(directory) / file_name(device_kind)
        return cls.read(path) if path.is_file() else cls()

    def lookup(
        self,
        device_kind: str,
        op: str,
        head_dim: int,
        group: int,
        page_size: int,
        cell_dtype: str,
    ) -> Tuned | None:
        """The sizes for a call, or `None` if they were not measured."""
        key = Key(device_kind, op, head_dim, group_bucket(group), page_size, cell_dtype)
        entry = self.entries.get(key)
        return None if entry is None else entry.tuned(op, group)

    def with_entry(self, key: Key, entry: Entry) -> TunedTable:
        """This table with one entry added or replaced."""
        return TunedTable({**self.entries, key: entry})

    def write(self, path: str | Path) -> None:
        """Write the table in one piece: a reader sees the old file or the new one."""
        path = Path(path)
        records = [{**vars(key), **vars(self.entries[key])} for key in sorted(self.entries)]
        lines = ",\n  ".join(json.dumps(record) for record in records)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(f'{{"entries": [\n  {lines}\n]}}\n', encoding="utf-8")
        os.replace(partial, path)


def file_name(device_kind: str) -> str:
    """Name of a device's table: "NVIDIA H200" is nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") + ".json"


def _read(file: Path) -> list[tuple[Key, Entry]]:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no JSON: {error}") from error
    records = table.get("entries") if isinstance(table, dict) else None
    if not isinstance(records, list) or table.keys() != {"entries"}:
        raise ValueError(f'{str(file)!r} is no table of sizes: expected {{"entries": [...]}}')
    return [_entry(record, f"{str(file)!r}, entry {i}") for i, record in enumerate(records)]


def _entry(record: Any, where: str) -> tuple[Key, Entry]:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {record!r} is no object")
    known = Key.__dataclass_fields__.keys() | Entry.__dataclass_fields__.keys()
    for name in record.keys() - known:
        raise ValueError(f"{where}: unknown key {name!r} (value {record[name]!r})")
    for name in known - record.keys() - {"microseconds"}:
        raise ValueError(f"{where}: {name!r} is missing")
    for name, value in record.items():
        wanted = _wanted(name, value, record["op"])
        if wanted is not None:
            raise ValueError(f"{where}: {name}={value!r} must be {wanted}")
    key = Key(**{name: record[name] for name in Key.__dataclass_fields__})
    sizes: dict[str, Any] = {name: record.get(name) for name in Entry.__dataclass_fields__}
    return key, Entry(**sizes)


def _wanted(name: str, value: Any, op: Any) -> str | None:
    """What a value should have been, or None if it is that."""
    if name == "op":
        return None if value in OPS else f"one of {', '.join(OPS)}"
    if name == "cell_dtype":
        return None if value in CELL_DTYPES else f"one of {', '.join(CELL_DTYPES)}"
    if name == "device_kind":
        return None if isinstance(value, str) and value else "the name of a device"
    if name == "microseconds":
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        return None if value is None or number else "a positive number"
    if name == "chunk_kv" and op == "prefill":
        return None if value is None else "null: prefill does not split keys"
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if name in ("group", "num_warps", "block_kv", "chunk_kv", "query_rows"):
        good = whole and power_of_two(value) == value
        return None if good else "a power of two"
    return None if whole else "a positive integer"

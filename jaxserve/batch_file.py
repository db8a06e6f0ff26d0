"""OpenAI Batch files: where the input lines are, which have an answer, and the output's records.

Knows JSONL on disk.  Does not know the engine (`batch_run.py` answers the lines), so a finished
job is recognised without loading a model.

An input line is `{"custom_id", "method", "url", "body"}`.  A record of the output is
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`; `error` is null
exactly where the answer is complete, and else says what and where: `{"code", "message", "line"}`.
Every non-blank input line gets one record, in the order in which they end.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from jaxserve.batch_line import LineError, LineRequest, parse_line
from jaxserve.protocol import RequestError, error_body

log = logging.getLogger(__name__)

BOM = b"\xef\xbb\xbf"


class Key(NamedTuple):
    """What makes two lines the same work: the id, and a hash of model, endpoint and body."""

    custom_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Line:
    """Where an input line is, and whose it is.  Its body stays on disk until its turn."""

    number: int
    offset: int
    size: int
    custom_id: str | None
    request_id: str
    is_valid: bool
    """False if it cannot be answered whatever the model."""


def answer_record(line: Line, body: Any) -> dict[str, Any]:
    """The record of an answered line."""
    return _record(line, 200, body, None)


def failure_record(line: Line, error: RequestError) -> dict[str, Any]:
    """The record of a line that cannot be answered, or whose answer failed."""
    body = error_body(str(error), error.status, error.param, error.code)
    complaint = {"code": error.code, "message": str(error), "line": line.number}
    return _record(line, error.status, body, complaint)


def _record(line: Line, status: int, body: Any, error: Any) -> dict[str, Any]:
    return {
        "id": f"batch_{line.request_id}_{line.number}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": line.request_id, "body": body},
        "error": error,
    }


@dataclass(frozen=True, slots=True)
class BatchJob:
    """An input file, an output file, and the lines between them.

    Opening a job reads both files and changes neither; `start` prepares the output.
    """

    input_path: Path
    output_path: Path
    model: str
    lines: tuple[Line, ...]
    """Every non-blank line that has no answer yet."""
    answered: frozenset[Key]
    """The lines that have one."""
    is_clean: bool
    """Whether the output holds those answers and nothing else."""

    @classmethod
    def open(
        cls, input_path: str | Path, output_path: str | Path, model: str, *, resume: bool = False
    ) -> BatchJob:
        """Read the files and decide what is to be done.

        Args:
            input_path: lines of requests.
            output_path: where records go; with `resume` it may have some.
            model: the served model's name.
            resume: keep the answers of the output file, retry its failures and redo lines whose
                body, endpoint or model has changed.

        Raises:
            ValueError: two lines have one custom_id; the output exists and `resume` is false; the
                output holds something else than records, or is a directory; or both paths are one
                file.
            OSError: a file cannot be read.
        """
        source, target = Path(input_path), Path(os.path.realpath(output_path))
        if target.exists() and source.exists() and source.samefile(target):
            raise ValueError(f"input and output are the same file, {str(input_path)!r}")
        if target.is_dir():
            raise ValueError(f"output {str(output_path)!r} is a directory; name a file")
        lines = tuple(_scan(source, model))
        _refuse_duplicates(lines)
        records: list[Key | None] = []
        if target.exists() and target.stat().st_size:
            if not resume:
                raise ValueError(
                    f"output file {str(output_path)!r} exists; continue it with --resume or name "
                    "another"
                )
            records = [record.key for record in _read_records(target)]
        answered = frozenset(records).intersection(map(_key, lines)) - {None}
        return cls(
            input_path=source,
            output_path=target,
            model=model,
            lines=tuple(line for line in lines if _key(line) not in answered),
            answered=frozenset(key for key in answered if key is not None),
            is_clean=len(records) == len(answered) and _ends_with_newline(target),
        )

    def start(self) -> IO[bytes]:
        """Open the output for appending, first cleaned of everything that is not a kept answer.

        Failures and a record cut off by a kill are dropped, as their lines are run again.  An
        answer that no input line asks for any more moves to a file beside the output, so that no
        finished work is lost.
        """
        self.output_path.parent.mkdir(parents=True, exist_ok=True)
        if not self.is_clean:
            self._clean()
        return self.output_path.open("ab")

    def failures(self) -> Iterator[tuple[Line, RequestError]]:
        """The pending lines that cannot be answered, and why."""
        for line, parsed in self._read(valid=False):
            if isinstance(parsed, LineError):
                yield line, parsed.error

    def requests(self) -> Iterator[tuple[Line, LineRequest]]:
        """The other pending lines, read one at a time, in order."""
        for line, parsed in self._read(valid=True):
            if isinstance(parsed, LineRequest):
                yield line, parsed

    def _read(self, *, valid: bool) -> Iterator[tuple[Line, LineRequest | LineError]]:
        with self.input_path.open("rb") as file:
            for line in self.lines:
                if line.is_valid == valid:
                    file.seek(line.offset)
                    yield line, parse_line(file.read(line.size), self.model)

    def _clean(self) -> None:
        wanted = set(self.answered)
        superseded = []
        handle, temporary = tempfile.mkstemp(
            dir=self.output_path.parent, prefix=self.output_path.name, suffix=".tmp"
        )
        try:
            with os.fdopen(handle, "wb") as kept:
                for record in _read_records(self.output_path):
                    if record.key in wanted:
                        wanted.remove(record.key)
                        kept.write(record.raw + b"\n")
                    elif record.key is not None:
                        superseded.append(record.raw + b"\n")
            if superseded:
                self._set_aside(superseded)
            os.chmod(temporary, self.output_path.stat().st_mode)
            os.replace(temporary, self.output_path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _set_aside(self, records: list[bytes]) -> None:
        path = self.output_path.with_name(self.output_path.name + ".superseded")
        with path.open("ab") as file:
            file.writelines(records)
        log.warning("%d answers that the input no longer asks for moved to %s", len(records), path)


def _scan(path: Path, model: str) -> Iterator[Line]:
    """Find the non-blank lines; a byte order mark and CRLF are not part of them."""
    with path.open("rb") as file:
        offset = 0
        for number, raw in enumerate(file, start=1):
            start = len(BOM) if number == 1 and raw.startswith(BOM) else 0
            content = raw[start:].rstrip(b"\r\n")
            if content.strip():
                parsed = parse_line(content, model)
                yield Line(
                    number=number,
                    offset=offset + start,
                    size=len(content),
                    custom_id=parsed.custom_id,
                    request_id=parsed.request_id,
                    is_valid=isinstance(parsed, LineRequest),
                )
            offset += len(raw)


def _refuse_duplicates(lines: Iterable[Line]) -> None:
    numbers = defaultdict(list)
    for line in lines:
        if line.custom_id is not None:
            numbers[line.custom_id].append(line.number)
    repeated = {key: found for key, found in numbers.items() if len(found) > 1}
    if repeated:
        shown = [
            f"{key!r} on lines {', '.join(map(str, found))}"
            for key, found in list(repeated.items())[:5]
        ]
        more = f" and {len(repeated) - 5} more" if len(repeated) > 5 else ""
        raise ValueError(
            f"custom_id must be unique: {'; '.join(shown)}{more}; nothing was run, rename them"
        )


def _key(line: Line) -> Key | None:
    return None if line.custom_id is None else Key(line.custom_id, line.request_id)


class _Record(NamedTuple):
    """A line of the output; `key` only where it is a complete answer."""

    key: Key | None
    raw: bytes


def _read_records(path: Path) -> Iterator[_Record]:
    """Read an output file; a last line that a kill cut off is left out.

    Raises:
        ValueError: any other line is not a record, so the file is not ours to change.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                record = msgspec.json.decode(raw, type=_OutputRecord)
            except (msgspec.DecodeError, RecursionError) as error:
                if not raw.endswith(b"\n"):
                    return
                raise ValueError(
                    f"line {number} of {str(path)!r} is not a batch result ({error}); name "
                    "another output file"
                ) from error
            yield _Record(record.key(), raw.rstrip(b"\r\n"))


class _OutputResponse(msgspec.Struct):
    status_code: int
    request_id: str


class _OutputRecord(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _OutputResponse | None
    error: dict[str, Any] | None

    def key(self) -> Key | None:
        if self.custom_id is None or self.error is not None or self.response is None:
            return None
        if self.response.status_code != 200:
            return None
        return Key(self.custom_id, self.response.request_id)


def _ends_with_newline(path: Path) -> bool:
    if not path.exists():
        return True
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

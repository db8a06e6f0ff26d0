"""Writes the records of a batch job as its lines end, and counts them.

Knows the output file.  Does not know who answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import msgspec

from jaxserve.batch_file import Line, answer_record, failure_record
from jaxserve.protocol import RequestError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BatchReport:
    """What became of the pending lines."""

    num_answered: int = 0
    num_failed: int = 0
    interrupted: bool = False


class BatchWriter:
    """Appends records, flushing each, so that a killed run loses only what was being computed."""

    def __init__(self, output: IO[bytes], on_record: Callable[[], object]) -> None:
        """Write to a file.

        Args:
            output: open for appending.
            on_record: called after each record.
        """
        self._output = output
        self._on_record = on_record
        self.report = BatchReport()

    def answer(self, line: Line, body: Any) -> None:
        """A line has its answer."""
        self.report.num_answered += 1
        self._write(answer_record(line, body))

    def fail(self, line: Line, error: RequestError) -> None:
        """A line cannot be answered, or its answer failed."""
        self.report.num_failed += 1
        log.debug("line %d (custom_id %r): %s", line.number, line.custom_id, error)
        self._write(failure_record(line, error))

    def _write(self, record: dict[str, Any]) -> None:
        self._output.write(msgspec.json.encode(record) + b"\n")
        self._output.flush()
        self._on_record()

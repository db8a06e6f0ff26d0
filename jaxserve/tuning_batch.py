"""The largest batch size that keeps the latency bounds: predicted first, then confirmed.

Knows rows of figures and a profile's text.  Does not know where the rows come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.config import EngineConfig
from scheduler.summary import Bounds

Row = Mapping[str, Any]
Measure = Callable[[int], Row]
"""Batch size to the figures of a run with it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The batch size found, and every row that was looked at."""

    batch_size: int
    predicted: tuple[Row, ...]
    measured: tuple[Row, ...] = field(default=())

    @property
    def row(self) -> Row:
        """Figures of the batch size found: measured, if any were."""
        rows = self.measured or self.predicted
        return next(row for row in rows if row["max_num_seqs"] == self.batch_size)


def keeps(row: Row, bounds: Bounds) -> bool:
    """Whether the P99 of TTFT and of TPOT keep their bounds."""
    return bounds.hold(row["ttft_p99_s"], row["tpot_p99_s"])


def choose(
    batch_sizes: Sequence[int], predict: Measure, measure: Measure | None, bounds: Bounds
) -> Choice:
    """Find the largest batch size that keeps the bounds.

    All sizes are predicted, which is cheap.  The runs begin at the largest that should do, go up
    while they keep the bounds and down while they do not, so that a prediction that is off by a
    size costs one run.

    Args:
        batch_sizes: to choose from.
        predict: by the simulator.
        measure: by a real run; None trusts the predictions.
        bounds: of the P99 of TTFT and TPOT.

    Raises:
        ValueError: not even the smallest keeps them; says what it reached.
    """
    sizes = sorted(set(batch_sizes))
    predicted = tuple(predict(size) for size in sizes)
    start = max((i for i, row in enumerate(predicted) if keeps(row, bounds)), default=0)
    if measure is None:
        if not keeps(predicted[start], bounds):
            raise ValueError(_none_keeps(predicted[start], bounds))
        return Choice(sizes[start], predicted)
    measured: list[Row] = []
    found = _confirm(sizes, start, measure, measured, bounds)
    if found is None:
        raise ValueError(_none_keeps(measured[-1], bounds))
    return Choice(sizes[found], predicted, tuple(sorted(measured, key=_size)))


def _confirm(
    sizes: Sequence[int], start: int, measure: Measure, measured: list[Row], bounds: Bounds
) -> int | None:
    """Index of the largest size that keeps the bounds among those run, next to one that does not.

    None if the smallest does not.  Appends the rows of all runs.
    """

    def run(index: int) -> bool:
        measured.append(measure(sizes[index]))
        return keeps(measured[-1], bounds)

    index = start
    if run(index):
        while index + 1 < len(sizes) and run(index + 1):
            index += 1
        return index
    while index > 0:
        index -= 1
        if run(index):
            return index
    return None


def _size(row: Row) -> int:
    return int(row["max_num_seqs"])


def _none_keeps(row: Row, bounds: Bounds) -> str:
    return (
        f"even a batch of {row['max_num_seqs']} has {latency_text(row)}, beyond "
        f"{bounds_text(bounds)}; loosen the bounds, shorten the prompts, or lower the load "
        "(--request-rate)"
    )


def bounds_text(bounds: Bounds) -> str:
    """The bounds in words."""
    parts = [
        f"{name} < {1e3 * value:g} ms"
        for name, value in (("TTFT", bounds.ttft_s), ("TPOT", bounds.tpot_s))
        if value is not None
    ]
    return " and ".join(parts) + " at P99"


def latency_text(row: Row) -> str:
    """What was reached, in words."""
    parts = [
        f"{name.upper()} P99 {_short(1e3 * row[f'{name}_p99_s'])} ms"
        for name in ("ttft", "tpot")
        if row[f"{name}_p99_s"] is not None
    ]
    return ", ".join(parts)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def profile(config: EngineConfig, choice: Choice, bounds: Bounds, source: str) -> str:
    """A YAML profile for `--config`: the batch size, and all that differs from the defaults.

    Args:
        config: what the runs were made with.
        choice: what was found.
        bounds: what it keeps.
        source: what was asked of which machine, one line.
    """
    import yaml

    row = choice.row
    how = "Measured" if choice.measured else "Simulated, not run"
    lines = [
        f"# Written by `jaxserve tune`: the largest batch with {bounds_text(bounds)}.",
        f"# {source}",
        f"# {how}: {row['output_tokens_per_s']:.0f} tokens/s, {latency_text(row)}.",
    ]
    values = {
        option.name.replace("_", "-"): _plain(getattr(config, option.name))
        for option in dataclasses.fields(config)
        if getattr(config, option.name) != option.default
    }
    values |= {"max-num-seqs": choice.batch_size}
    if "batch-buckets" in values:
        kept = [b for b in values["batch-buckets"] if b < choice.batch_size]
        values["batch-buckets"] = [*kept, choice.batch_size]
    return "\n".join([*lines, yaml.safe_dump(values, sort_keys=False, default_flow_style=False)])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value

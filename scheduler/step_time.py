"""How long the device takes for a plan: what the plan asks of it, and models of the time.

Knows counts of tokens and rows.  `FittedCost` learns from measured steps, `Roofline` bounds them
from a chip and a model; neither knows how a step is run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from scheduler.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a plan asks of the device."""

    rows: int
    """Sequences that decode."""
    chunk_tokens: int
    """Prompt tokens, of all prefill chunks."""
    kv_tokens: int
    """Keys that the attention of the first iteration reads, of all sequences together, the new
    ones included; each iteration after it reads one more per row."""
    num_steps: int = 1
    """Iterations of the device."""
    num_seqs: int
    """Sequences that take part: the decoding and the prefilling ones."""
    num_pairs: int = 0
    """Pairs of a query and a key in the first iteration; 0 if they are not known."""

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """The work of a plan, all of whose rows run to their end."""
        rows = chunk_tokens = kv_tokens = num_pairs = 0
        for entry in plan.entries:
            if entry.is_decode:
                rows += 1
                kv_tokens += entry.start + 1
                num_pairs += entry.start + 1
            else:
                chunk_tokens += entry.count
                kv_tokens += entry.end
                num_pairs += entry.count * (entry.start + entry.end + 1) // 2
        return cls(
            rows=rows,
            chunk_tokens=chunk_tokens,
            kv_tokens=kv_tokens,
            num_steps=plan.num_steps,
            num_seqs=len(plan.entries),
            num_pairs=num_pairs,
        )

    @property
    def is_decode(self) -> bool:
        """Whether no prompt token is computed."""
        return self.chunk_tokens == 0

    @property
    def total_kv_tokens(self) -> int:
        """Keys read by all iterations together."""
        n = self.num_steps
        return n * self.kv_tokens + self.rows * (n * (n - 1) // 2)


class StepCost(Protocol):
    """A model of the device's time."""

    def seconds(self, work: StepWork) -> float:
        """Device time of a whole plan, all its iterations."""
        ...


@dataclass(frozen=True, slots=True)
class Buckets:
    """The compiled sizes that a step is padded to; no sizes, no padding.

    A decode step is padded to `rows`, a mixed step to the most rows and to `chunks`.
    """

    rows: tuple[int, ...] = ()
    """Sequence rows, increasing."""
    chunks: tuple[int, ...] = ()
    """Chunk rows of mixed steps, increasing."""

    def pad(self, work: StepWork) -> tuple[int, int]:
        """Sequence rows and chunk rows that the device computes in one iteration."""
        if work.is_decode:
            return _at_least(self.rows, work.num_seqs), 0
        most = max(work.num_seqs, *self.rows) if self.rows else work.num_seqs
        return most, _at_least(self.chunks, work.chunk_tokens)


def _at_least(sizes: Sequence[int], need: int) -> int:
    index = bisect_left(sizes, need)
    return sizes[index] if index < len(sizes) else need


_FORGET = 0.999
"""Weight of what is known after each new record: about the last thousand count."""
_ENOUGH = 8
"""Records of a bucket from which its own fit is better than that of all of its kind."""
_TRUSTED = 16
"""Records from which a time far off the prediction is taken for a disturbance."""
_REFIT = 16
"""Records from one solution of the equations to the next: they are a good part of a step's time on
the host, and after a few records one more changes little."""
_FAR = 3.0
"""A time further off than this factor counts as if it were so far off."""
_RIDGE = (1e-6, 1e-7, 1e-5, 1e-5, 1e-4)
"""Relative weights, by feature, that keep the equations solvable where features go together.

What does not vary in the records is then laid to the iterations, not to the keys, and grows no
further where those do."""
_NUM_FEATURES = len(_RIDGE)


@dataclass(slots=True)
class _Fit:
    """Least squares by running sums, without negative coefficients.

    No part of a step takes less than no time.  A coefficient that comes out negative is noise,
    and it would make predictions outside of what was measured absurd; it is left out.
    """

    num_records: int = 0
    moments: list[list[float]] = field(
        default_factory=lambda: [[0.0] * _NUM_FEATURES for _ in range(_NUM_FEATURES)]
    )
    targets: list[float] = field(default_factory=lambda: [0.0] * _NUM_FEATURES)
    _coefficients: list[float] | None = None

    def record(self, features: Sequence[float], seconds: float) -> None:
        if self.num_records >= _TRUSTED:
            expected = self.predict(features)
            seconds = min(max(seconds, expected / _FAR), expected * _FAR)
        for row, left in zip(self.moments, features, strict=True):
            row[:] = [_FORGET * m + left * x for m, x in zip(row, features, strict=True)]
        self.targets = [
            _FORGET * t + x * seconds for t, x in zip(self.targets, features, strict=True)
        ]
        self.num_records += 1
        if self.num_records <= _TRUSTED or self.num_records % _REFIT == 0:
            self._coefficients = None

    def predict(self, features: Sequence[float]) -> float:
        coefficients = self._coefficients or self.solve()
        return sum(c * x for c, x in zip(coefficients, features, strict=True))

    def solve(self) -> list[float]:
        self._coefficients = _solve_nonnegative(self.moments, self.targets)
        return self._coefficients


class FittedCost:
    """Step times as measured: a linear model per bucket, and one per kind for unknown buckets.

    Decode steps and mixed steps are two kinds.  The time of a step is linear in its iterations,
    rows, prompt tokens and keys read.  Old records are forgotten slowly, and a record that is far
    off counts only as a moderate one.
    """

    def __init__(self, buckets: Buckets | None = None) -> None:
        """Start knowing nothing.

        Args:
            buckets: the sizes that steps are padded to; none if absent.
        """
        self.buckets = buckets or Buckets()
        self._kinds = {True: _Fit(), False: _Fit()}
        self._fits: dict[tuple[int, int], _Fit] = {}

    @property
    def num_records(self) -> int:
        """Steps recorded since the start."""
        return sum(fit.num_records for fit in self._kinds.values())

    def record(self, work: StepWork, seconds: float) -> None:
        """Learn from a dispatch that took the device so long.

        Raises:
            ValueError: `seconds` is not positive.
        """
        if not seconds > 0:
            raise ValueError(f"seconds={seconds} must be positive; leave out what was not measured")
        size = self.buckets.pad(work)
        self._kinds[work.is_decode].record(_features(work, *size), seconds)
        fit = self._fits.setdefault(self._key(size), _Fit())
        fit.record(_features(work, work.num_seqs, work.chunk_tokens), seconds)

    def seconds(self, work: StepWork) -> float:
        """Expected device time of a plan; 0 if nothing is known."""
        size = self.buckets.pad(work)
        fit = self._fits.get(self._key(size))
        if self._has_sizes and fit is not None and fit.num_records >= _ENOUGH:
            return fit.predict(_features(work, work.num_seqs, work.chunk_tokens))
        features = _features(work, *size)
        kind = self._kinds[work.is_decode]
        if kind.num_records == 0:
            kind = self._kinds[not work.is_decode]
        return kind.predict(features) if kind.num_records else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All that is known, as plain data for a JSON file."""
        return {
            "row_buckets": list(self.buckets.rows),
            "chunk_buckets": list(self.buckets.chunks),
            "decode": _fit_to_dict(self._kinds[True]),
            "mixed": _fit_to_dict(self._kinds[False]),
            "buckets": [
                {"rows": rows, "chunk": chunk, **_fit_to_dict(fit)}
                for (rows, chunk), fit in sorted(self._fits.items())
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FittedCost:
        """What `to_dict` gave.

        Raises:
            ValueError: it did not.
        """
        try:
            cost = cls(Buckets(tuple(values["row_buckets"]), tuple(values["chunk_buckets"])))
            for is_decode, name in ((True, "decode"), (False, "mixed")):
                cost._kinds[is_decode] = _fit_from_dict(values[name])
            for item in values["buckets"]:
                cost._fits[int(item["rows"]), int(item["chunk"])] = _fit_from_dict(item)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"not a table of step times, {type(error).__name__}: {error}; "
                "write one with FittedCost.to_dict"
            ) from error
        return cost

    @property
    def _has_sizes(self) -> bool:
        return bool(self.buckets.rows or self.buckets.chunks)

    def _key(self, size: tuple[int, int]) -> tuple[int, int]:
        """Without sizes to pad to, all steps of a kind are one bucket."""
        return size if self._has_sizes else (0, int(size[1] > 0))


def _features(work: StepWork, rows: int, chunk: int) -> tuple[float, ...]:
    n = work.num_steps
    # The dispatch, its iterations, their rows, prompt tokens, and keys.
    return (1.0, n, n * rows, chunk, work.total_kv_tokens)


def _solve_nonnegative(moments: list[list[float]], targets: list[float]) -> list[float]:
    """Least squares with the features left out whose coefficients would be negative."""
    kept = [i for i in range(len(targets)) if moments[i][i] > 0]
    while kept:
        solution = _solve(
            [[moments[i][j] for j in kept] for i in kept],
            [targets[i] for i in kept],
            [_RIDGE[i] for i in kept],
        )
        worst = min(range(len(kept)), key=solution.__getitem__)
        if solution[worst] >= 0:
            coefficients = [0.0] * len(targets)
            for i, value in zip(kept, solution, strict=True):
                coefficients[i] = value
            return coefficients
        del kept[worst]
    return [0.0] * len(targets)


def _solve(matrix: list[list[float]], right: list[float], ridge: list[float]) -> list[float]:
    """Solve the normal equations: features scaled to the same size, a ridge, elimination."""
    size = len(right)
    scale = [matrix[i][i] ** 0.5 for i in range(size)]
    rows = [
        [matrix[i][j] / (scale[i] * scale[j]) + (ridge[i] if i == j else 0.0) for j in range(size)]
        + [right[i] / scale[i]]
        for i in range(size)
    ]
    # With the ridge the matrix is positive definite: no pivot is zero, and none needs a search.
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return [value / scale[i] for i, value in enumerate(solution)]


def _fit_to_dict(fit: _Fit) -> dict[str, Any]:
    fit.solve()  # so that whoever reads it predicts the same
    return {
        "num_records": fit.num_records,
        "moments": [list(row) for row in fit.moments],
        "targets": list(fit.targets),
    }


def _fit_from_dict(values: Mapping[str, Any]) -> _Fit:
    moments = [[float(x) for x in row] for row in values["moments"]]
    targets = [float(x) for x in values["targets"]]
    if [len(row) for row in moments] != [_NUM_FEATURES] * len(targets) or len(moments) != len(
        targets
    ):
        raise ValueError(
            f"a table of step times has {_NUM_FEATURES} features, not {len(targets)}; measure anew"
        )
    return _Fit(int(values["num_records"]), moments, targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipSpec:
    """What a chip can do at best; data sheets, dense 16-bit products."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    """Of its memory."""
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes of a dense decoder."""

    name: str
    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weight_bytes_per_param: float = 2.0
    kv_bytes_per_element: float = 2.0

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, each read once in an iteration."""
        return self.num_params * self.weight_bytes_per_param

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of a token's keys and values in all layers."""
        heads = self.num_layers * self.num_kv_heads * self.head_dim
        return 2 * heads * self.kv_bytes_per_element

    @property
    def flops_per_token(self) -> float:
        """A multiplication and an addition per weight."""
        return 2 * self.num_params

    @property
    def flops_per_pair(self) -> float:
        """Both products of attention for one query and one key, in all layers and heads."""
        return 4 * self.num_layers * self.num_heads * self.head_dim


class Roofline:
    """A lower bound of the time of a step, from data sheets (Williams et al., CACM 2009).

    seconds = sum over iterations of max(bytes / bandwidth, operations / peak) + overhead, where
    bytes are all weights once, the keys and values that attention reads, and those it writes.
    """

    def __init__(
        self, chip: ChipSpec, model: ModelSpec, *, num_chips: int = 1, overhead_s: float = 0.0
    ) -> None:
        """A model on one chip, or divided among several without a loss.

        Args:
            chip: its data sheet.
            model: its sizes.
            num_chips: chips that share weights, pages and operations; their communication is
                not part of the bound.
            overhead_s: seconds of each iteration beside the bound.
        """
        self.chip = chip
        self.model = model
        self.num_chips = num_chips
        self.overhead_s = overhead_s

    def seconds(self, work: StepWork) -> float:
        """Least device time of a plan."""
        return sum(self._iteration_s(work, i) for i in range(work.num_steps))

    def num_kv_tokens(self, memory_share: float = 0.9) -> int:
        """Tokens whose keys and values fit beside the weights.

        Raises:
            ValueError: the weights alone do not fit.
        """
        room = self.chip.memory_bytes * self.num_chips * memory_share - self.model.weight_bytes
        if room <= 0:
            raise ValueError(
                f"the {self.model.weight_bytes / 1e9:.0f} GB of weights of {self.model.name} do "
                f"not fit {memory_share:.0%} of the memory of {self.num_chips} {self.chip.name} "
                f"({self.chip.memory_bytes / 1e9:.0f} GB each); use more chips"
            )
        return int(room // self.model.kv_bytes_per_token)

    def _iteration_s(self, work: StepWork, index: int) -> float:
        model, chip = self.model, self.chip
        tokens = work.rows + work.chunk_tokens
        grown = index * work.rows  # keys that the iterations before have added
        kv_bytes = (work.kv_tokens + grown + tokens) * model.kv_bytes_per_token
        pairs = (work.num_pairs or work.kv_tokens) + grown
        flops = tokens * model.flops_per_token + pairs * model.flops_per_pair
        moved_s = (model.weight_bytes + kv_bytes) / (chip.bytes_per_s * self.num_chips)
        computed_s = flops / (chip.flops_per_s * self.num_chips)
        return max(moved_s, computed_s) + self.overhead_s

"""Who held which slot when: a trace of steps as bars, one panel per policy.

`timeline` prepares the data of a step trace, `draw` makes the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.plot.figure import new_figure

PREFILL, DECODE, WAIT = "prefill", "decode", "wait"
_PREFILL_COLOR = "#f2b134"
_WAIT_COLOR = "#d9534f"
_IDLE_COLOR = "#eeeeee"
_DECODE_COLORS = ("#0b5cad", "#3f87c9", "#74aede", "#2b6a9e", "#5599cc", "#93c1e8")
"""Shades for one sequence after another, so that a change of hands is seen."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in which a sequence held a slot and did one kind of work."""

    slot: int
    seq_id: str
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A run's bars."""

    label: str
    num_slots: int
    bars: tuple[Bar, ...]
    end_s: float
    """When the last step ended."""

    @property
    def share_at_work(self) -> float:
        """Share of slot time in which somebody's work was done."""
        held = sum(bar.end_s - bar.start_s for bar in self.bars if bar.kind != WAIT)
        return held / (self.num_slots * self.end_s) if self.end_s > 0 else 0.0


def timeline(label: str, num_slots: int, steps: Sequence[Mapping[str, Any]]) -> Timeline:
    """Bars of a step trace; those of steps in a row are joined.

    Args:
        label: heading of the panel.
        num_slots: rows of the panel.
        steps: in order, each with `start_s`, `seconds` and `slots`, which are (slot, sequence's
            id, "prefill" or "decode"), and, if known, `rows`: how many decode.

    Raises:
        ValueError: a step names a slot that is not there.
    """
    open_bars: dict[int, tuple[int, Bar]] = {}
    done: list[Bar] = []
    for number, step in enumerate(steps):
        start_s, end_s = step["start_s"], step["start_s"] + step["seconds"]
        for slot, seq_id, held_for in step["slots"]:
            # A step without decode rows holds up all that would decode.
            kind = WAIT if held_for == DECODE and step.get("rows") == 0 else held_for
            if not 0 <= slot < num_slots:
                raise ValueError(f"{label}: slot {slot} is not among the {num_slots} of the trace")
            bar = Bar(slot, seq_id, kind, start_s, end_s)
            if slot in open_bars:
                last, before = open_bars[slot]
                # A step that left the sequence out must stay visible.
                if last == number - 1 and (before.seq_id, before.kind) == (seq_id, kind):
                    bar = replace(bar, start_s=before.start_s)
                else:
                    done.append(before)
            open_bars[slot] = (number, bar)
    done += [bar for _, bar in open_bars.values()]
    done.sort(key=lambda bar: (bar.start_s, bar.slot))
    end_s = max((bar.end_s for bar in done), default=0.0)
    return Timeline(label, num_slots, tuple(done), end_s)


def draw(timelines: Sequence[Timeline], title: str = "") -> Any:
    """A figure with a panel per timeline, on one time axis.

    Raises:
        ValueError: there is no matplotlib.
    """
    heights = [max(one.num_slots, 4) for one in timelines]
    figure = new_figure(12, 1.1 + sum(0.5 + 0.14 * rows for rows in heights))
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)
    end_s = max(one.end_s for one in timelines)
    scale, unit = (1.0, "s") if end_s >= 2 else (1e3, "ms")
    for axes, one in zip(panels[:, 0], timelines, strict=True):
        _panel(axes, one, scale, unit)
    panels[-1, 0].set_xlabel(f"time, {unit}")
    panels[-1, 0].set_xlim(0, 1.01 * scale * end_s)
    _legend(figure, any(bar.kind == WAIT for one in timelines for bar in one.bars))
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False)
    return figure


def _panel(axes: Any, one: Timeline, scale: float, unit: str) -> None:
    axes.barh(
        range(one.num_slots),
        [scale * one.end_s] * one.num_slots,
        height=0.82,
        color=_IDLE_COLOR,
        linewidth=0,
    )
    order = {seq_id: i for i, seq_id in enumerate(dict.fromkeys(bar.seq_id for bar in one.bars))}
    for bar in one.bars:
        axes.barh(
            bar.slot,
            scale * (bar.end_s - bar.start_s),
            left=scale * bar.start_s,
            height=0.82,
            color=_color(bar, order[bar.seq_id]),
            linewidth=0,
        )
    axes.set_ylim(one.num_slots - 0.5, -0.5)
    axes.set_yticks(_ticks(one.num_slots))
    axes.set_ylabel("slot")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"{one.label}: done after {_short(scale * one.end_s)} {unit}, slots at work "
        f"{100 * one.share_at_work:.0f} % of that time",
        fontsize=10,
        loc="left",
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _color(bar: Bar, number: int) -> str:
    if bar.kind == DECODE:
        return _DECODE_COLORS[number % len(_DECODE_COLORS)]
    return _PREFILL_COLOR if bar.kind == PREFILL else _WAIT_COLOR


def _ticks(num_slots: int) -> range:
    return range(0, num_slots, max(1, num_slots // 8))


def _legend(figure: Any, with_waits: bool) -> None:
    from matplotlib.patches import Patch

    entries = {
        "prefill": _PREFILL_COLOR,
        "decode (a shade per sequence)": _DECODE_COLORS[0],
        "held up by a prefill": _WAIT_COLOR,
        "nothing": _IDLE_COLOR,
    }
    if not with_waits:
        del entries["held up by a prefill"]
    figure.legend(
        handles=[Patch(color=color, label=label) for label, color in entries.items()],
        loc="outside lower right",
        ncols=len(entries),
        frameon=False,
        fontsize=9,
    )

"""The picture of a run: decode throughput against slots, and ragged wall times."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.labels import labels

_OURS = ("#0b5cad", "#3fa0e6")
_OTHERS = {"openvino": "#d1602b", "vllm": "#6a4fa3", "transformers": "#7a7f87"}
_CLIP = 2.6
"""A bar longer than so many times the next longest is cut, and says how long it is."""


def draw(doc: Mapping[str, Any], path: Path) -> None:
    """Write the picture as a PNG file.

    Raises:
        ImportError: there is no matplotlib.
    """
    from matplotlib.figure import Figure

    ragged = [item for item in doc["items"] if item["kind"] == "ragged"]
    styles = _styles(doc)
    height = 1.6 + 0.3 * max(12, (len(styles) + 1) * max(1, len(ragged)))
    figure = Figure(figsize=(13, height), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.05, 1))
    _decode(left, doc, styles)
    _ragged(right, doc, ragged, styles)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    cpu = doc["machine"]
    figure.suptitle(
        f"SmolLM2-135M-Instruct on {cpu['num_cores']} cores ({cpu['cpu']}), medians of "
        f"{doc['settings']['repeats']} interleaved repeats",
        fontsize=12,
    )
    figure.savefig(path)


def _styles(doc: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Engine -> label, colour and pattern; one colour per engine, light lines for int8."""
    names = labels(doc["engines"])
    measured = {row["engine"] for row in doc["rows"]}
    interpreters: list[str] = []
    found = {}
    for engine in doc["engines"]:
        if engine["name"] not in measured:
            continue
        if engine["family"] == "jaxserve":
            version = engine["facts"].get("versions", {}).get("jax", "")
            if version not in interpreters:
                interpreters.append(version)
            color = _OURS[interpreters.index(version) % len(_OURS)]
        else:
            color = _OTHERS[engine["family"]]
        found[engine["name"]] = {
            "label": names[engine["name"]],
            "color": color,
            "ours": engine["family"] == "jaxserve",
            "int8": engine["weights"] == "int8",
        }
    return found


def _decode(axes: Any, doc: Mapping[str, Any], styles: Mapping[str, dict[str, Any]]) -> None:
    items = {item["name"]: item["slots"] for item in doc["items"] if item["kind"] == "fixed"}
    lines = {
        name: [r for r in doc["rows"] if r["engine"] == name and r["item"] in items]
        for name in styles
    }
    # The legend in the order of the lines' ends, the fastest first.
    names = sorted(
        (name for name in styles if lines[name]),
        key=lambda name: -lines[name][-1]["tokens_per_s"]["median"],
    )
    for name in names:
        rows, style = lines[name], styles[name]
        rates = [row["tokens_per_s"] for row in rows]
        median = [rate["median"] for rate in rates]
        below = [rate["median"] - rate["min"] for rate in rates]
        above = [rate["max"] - rate["median"] for rate in rates]
        axes.errorbar(
            [items[row["item"]] for row in rows],
            median,
            yerr=[below, above],
            label=style["label"],
            color=style["color"],
            linestyle="--" if style["int8"] else "-",
            marker="o" if style["ours"] else "s",
            markerfacecolor="white" if style["int8"] else style["color"],
            markersize=5.5,
            linewidth=2.2 if style["ours"] else 1.5,
            capsize=2.5,
        )
    slots = list(items.values())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(slots, [str(count) for count in slots])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.set_xlabel("sequences at once")
    axes.set_ylabel("decoded tokens/s (higher is better)")
    axes.set_title("Decoding, 128-token prompts", fontsize=11)
    if slots:
        axes.legend(fontsize=8.5, frameon=False)


def _ragged(
    axes: Any,
    doc: Mapping[str, Any],
    items: list[Mapping[str, Any]],
    styles: Mapping[str, dict[str, Any]],
) -> None:
    bars = []
    position = 0.0
    for item in items:
        rows = {r["engine"]: r["seconds"] for r in doc["rows"] if r["item"] == item["name"]}
        start = position
        for name in sorted(rows.keys() & styles.keys(), key=lambda name: rows[name]["median"]):
            bars.append((position, rows[name], styles[name]))
            position += 1
        if position > start:
            axes.text(
                *(-0.01, start - 0.75, f"{item['slots']} slots"),
                transform=axes.get_yaxis_transform(),
                ha="right",
                fontsize=10,
                fontweight="bold",
            )
        position += 1.2
    if not bars:
        return
    end = _axis_end([seconds["median"] for _, seconds, _ in bars])
    for place, seconds, style in bars:
        _bar(axes, place, seconds, style, end)
    axes.set_yticks([place for place, *_ in bars], [style["label"] for *_, style in bars])
    axes.tick_params(axis="y", length=0, labelsize=8.5)
    axes.set_xlim(0, end * 1.18)
    axes.set_ylim(bars[-1][0] + 0.7, -1.4)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("seconds (lower is better)")
    axes.set_title("Ragged work: 64 requests, 5,936 output tokens", fontsize=11)


def _axis_end(medians: list[float]) -> float:
    """The longest bar that is not so long that it would dwarf all others."""
    ordered = sorted(medians)
    end = ordered[0]
    for value in ordered:
        if value > _CLIP * end:
            break
        end = value
    return end


def _bar(
    axes: Any, place: float, seconds: Mapping[str, float], style: dict[str, Any], end: float
) -> None:
    median = seconds["median"]
    cut = median > end
    shown = end * 1.02 if cut else median
    axes.barh(
        place,
        shown,
        height=0.78,
        color=style["color"],
        alpha=0.55 if style["int8"] else 1.0,
        hatch="///" if style["int8"] else None,
        edgecolor="white",
        linewidth=0.5,
    )
    if not cut:
        spread = [[median - seconds["min"]], [seconds["max"] - median]]
        axes.errorbar(median, place, xerr=spread, color="#333333", capsize=2, linewidth=1)
    text = f"{median:.1f} s" + (" →" if cut else "")
    axes.text(
        (shown if cut else seconds["max"]) + 0.012 * end, place, text, va="center", fontsize=9
    )

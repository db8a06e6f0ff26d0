"""Where matplotlib comes in: an empty figure, and a file of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg")
COLORS = ("#0b5cad", "#d1602b", "#2e8b57", "#6a4fa3", "#7a7f87")


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches that is not tied to any window.

    Raises:
        ValueError: there is no matplotlib; says how to get it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "pictures need matplotlib, which is not installed: pip install 'jaxserve[plot]'"
        ) from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def check_path(path: str | Path) -> Path:
    """The path, if it names a kind of picture that can be written.

    Raises:
        ValueError: it does not.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"{str(path)!r} is no picture's name; end it in {' or '.join(SUFFIXES)}")
    return Path(path)


def save(figure: Any, path: str | Path) -> None:
    """Write a PNG or SVG file, the same bytes for the same figure.

    Raises:
        ValueError: the suffix is neither.
        OSError: the file cannot be written.
    """
    target = check_path(path)
    from matplotlib import rc_context

    # Dates, and the ids that SVG files have, would differ from run to run.
    metadata = {"Date": None} if target.suffix.lower() == ".svg" else {}
    with rc_context({"svg.hashsalt": "jaxserve"}):
        figure.savefig(target, metadata=metadata)


def plain(axes: Any) -> None:
    """Axes with a light grid and no box."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)

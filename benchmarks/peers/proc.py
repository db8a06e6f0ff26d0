"""Processor time and memory of process trees, and of the whole machine, from /proc.

Seconds are of one core.  Knows Linux's text formats.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_HZ = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One line of /proc/<pid>/stat."""

    pid: int
    parent: int
    cpu_s: float
    """Of the process and of the children it has waited for."""


def parse_stat(text: str) -> Process:
    """One process; its name may hold blanks and brackets."""
    pid, _, rest = text.partition(" (")
    fields = rest.rpartition(") ")[2].split()
    ticks = sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime
    return Process(int(pid), int(fields[1]), ticks / _HZ)


def parse_busy(text: str) -> float:
    """Busy core-seconds since boot from /proc/stat, time taken by a hypervisor included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, text.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _HZ


def parse_peak_rss(text: str) -> int:
    """Peak resident bytes from /proc/<pid>/status; 0 for a process without memory."""
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def busy_s() -> float:
    """Busy core-seconds of the machine since boot."""
    return parse_busy((_PROC / "stat").read_text())


def tree(root: int) -> list[Process]:
    """The process and all its descendants."""
    children: dict[int, list[Process]] = {}
    found = []
    for process in _processes():
        children.setdefault(process.parent, []).append(process)
        if process.pid == root:
            found.append(process)
    for process in found:  # grows while it is walked
        found.extend(children.get(process.pid, []))
    return found


def tree_cpu_s(root: int) -> float:
    """Core-seconds used by the process and its descendants."""
    return sum(process.cpu_s for process in tree(root))


def peak_rss_bytes(root: int) -> int:
    """Sum of the peaks of the process and its descendants; shared pages count in each."""
    return sum(parse_peak_rss(text) for text in _read(p.pid for p in tree(root)))


def reset_peak_rss(root: int) -> bool:
    """Let the peaks start again from what is resident now; False where that is not allowed."""
    try:
        for process in tree(root):
            (_PROC / str(process.pid) / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _processes() -> Iterable[Process]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                yield parse_stat((entry / "stat").read_text())
            except OSError:
                continue  # it has ended meanwhile


def _read(pids: Iterable[int]) -> Iterable[str]:
    for pid in pids:
        try:
            yield (_PROC / str(pid) / "status").read_text()
        except OSError:
            continue

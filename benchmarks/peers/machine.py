"""What a reader has to know of the machine: processor, memory, settings; no names, no paths."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

_FEATURES = (
    *("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8"),
)


def machine() -> dict[str, Any]:
    """Facts about this machine as they are now."""
    cpu = parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    flags = cpu.get("flags", "").split()
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "cpu_family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "features": [feature for feature in _FEATURES if feature in flags],
        "without": [feature for feature in _FEATURES if feature not in flags],
        "num_cores": len(os.sched_getaffinity(0)),
        "virtual": "hypervisor" in flags,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "transparent_huge_pages": _huge_pages(),
        "kernel": platform.release().partition("-")[0],
        "load_average": os.getloadavg()[0],
    }


def parse_cpuinfo(text: str) -> dict[str, str]:
    """The first processor of /proc/cpuinfo."""
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def parse_choice(text: str) -> str:
    """The chosen one of a setting such as "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", text)
    return found.group(1) if found else text.strip()


def _huge_pages() -> str | None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return parse_choice(setting.read_text(encoding="utf-8")) if setting.exists() else None

"""The instruction sets that kernels are compiled for, and which of them this CPU has."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_BF16 = (*_AVX512, "avx512_bf16")


@dataclass(frozen=True)
class InstructionSet:
    """One way to compile the kernels."""

    name: str
    features: tuple[str, ...]
    """What the CPU must have, in the words of /proc/cpuinfo."""
    defines: tuple[str, ...] = ()
    """Macros that choose between forms of the source."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler options for it."""
        machine = (f"-m{_COMPILER_WORDS.get(f, f)}" for f in self.features)
        return (*machine, *(f"-D{define}" for define in self.defines))

    def missing(self) -> tuple[str, ...]:
        """Features that this CPU lacks."""
        return tuple(f for f in self.features if f not in cpu_features())


_COMPILER_WORDS = {
    "avx512_bf16": "avx512bf16",
    "amx_tile": "amx-tile",
    "amx_bf16": "amx-bf16",
}

_ALL = (
    InstructionSet("amx", (*_BF16, "amx_tile", "amx_bf16"), ("JAXSERVE_AMX",)),
    InstructionSet("avx512_bf16", _BF16),
    InstructionSet("avx512", _AVX512),
    InstructionSet("avx2", _AVX2),
)

EMULATED_AMX = InstructionSet("amx_emulated", _BF16, ("JAXSERVE_AMX", "JAXSERVE_EMULATE_AMX"))
"""AMX with its tiles in plain C++: slow, for tests on CPUs without AMX."""


def best_first() -> tuple[InstructionSet, ...]:
    """The instruction sets of kernels, the fastest first, whether this CPU has them or not."""
    return _ALL


def instruction_set(name: str) -> InstructionSet:
    """The instruction set called `name`.

    Raises:
        ValueError: there is none.
    """
    known = {known.name: known for known in (*_ALL, EMULATED_AMX)}
    if name not in known:
        raise ValueError(f"no CPU kernels for {name!r}; known are {', '.join(known)}")
    return known[name]


@functools.cache
def cpu_features() -> frozenset[str]:
    """What this CPU has, in the words of /proc/cpuinfo; nothing where that cannot be read."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), ":")
    return frozenset(flags.partition(":")[2].split())

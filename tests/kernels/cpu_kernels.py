"""The CPU kernels in tests: built once per process into the cache that all tests share."""

from __future__ import annotations

import functools

import pytest

from jaxserve.files import cache_directory
from pallas_kernels import cpu
from pallas_kernels.cpu.instructions import EMULATED_AMX

NAMES = ("amx", "avx512_bf16", "avx512", "avx2")
"""Instruction sets with an attention of their own."""
ALL = (*NAMES, EMULATED_AMX.name)


@functools.cache
def _refused(name: str) -> str | None:
    try:
        cpu.load(cpu.instruction_set(name), cache_directory(None) / "kernels")
    except cpu.Unavailable as error:
        return str(error)
    return None


def need(name: str) -> str:
    """`name`, with the kernels of that instruction set loaded; skips where they cannot be."""
    reason = _refused(name)
    if reason is not None:
        pytest.skip(f"no {name} kernels here: {reason}")
    return name

"""Loads compiled kernels into the process and makes them known to XLA."""

from __future__ import annotations

import ctypes
from pathlib import Path

import jax

from pallas_kernels.cpu import build
from pallas_kernels.cpu.build import Unavailable
from pallas_kernels.cpu.instructions import InstructionSet

OPERATIONS = (
    "linear",
    "linear_add",
    "norm_linear",
    "norm_swiglu",
    "norm_argmax",
    "weight_rows",
    "attention",
    "write",
    "rotate_write_attend",
    "ask",
)

_PROBLEMS = {
    1: "the operating system does not allow their instructions",
    2: "their products are wrong on this machine",
}

_loaded: dict[str, ctypes.CDLL] = {}
"""XLA's table of targets is the process's, and has no question "is it there"."""


def target(instructions: str, operation: str) -> str:
    """Name under which XLA knows an operation."""
    return f"jaxserve_{instructions}_{operation}"


def is_loaded(instructions: str) -> bool:
    """Whether the kernels of an instruction set can be called in this process."""
    return instructions in _loaded


def load(instructions: InstructionSet, directory: Path) -> None:
    """Build the kernels if `directory` lacks them, and make them callable.

    Raises:
        Unavailable: this CPU or machine cannot have them; says why.
    """
    if is_loaded(instructions.name):
        return
    missing = instructions.missing()
    if missing:
        raise Unavailable(f"this CPU has no {', '.join(missing)}")
    path = build.library(instructions, directory)
    try:
        library = ctypes.CDLL(str(path))
        problem = library.jaxserve_problem()
        handlers = {name: getattr(library, f"jaxserve_{name}") for name in OPERATIONS}
    except (OSError, AttributeError) as error:
        raise Unavailable(f"{path.name} does not load: {error}") from error
    if problem:
        raise Unavailable(_PROBLEMS.get(problem, f"{path.name} reports problem {problem}"))
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(
            target(instructions.name, name), jax.ffi.pycapsule(handler), platform="cpu"
        )
    _loaded[instructions.name] = library

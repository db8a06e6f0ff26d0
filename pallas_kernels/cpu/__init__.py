"""Kernels for CPUs in C++, called by XLA on its own thread pool through `jax.ffi`.

XLA's CPU backend packs every weight anew on every call and transposes around batched attention.
These kernels read weights that were packed once and a cache laid out for their products; a layer
is five calls.  They are compiled on first use with the system's compiler, for the instruction
sets of `instructions.py`; without a compiler or such a CPU everything runs through XLA instead.
"""

from pallas_kernels.cpu.build import Unavailable
from pallas_kernels.cpu.instructions import InstructionSet, best_first, instruction_set
from pallas_kernels.cpu.library import is_loaded, load

__all__ = [
    "InstructionSet",
    "Unavailable",
    "best_first",
    "instruction_set",
    "is_loaded",
    "load",
]

"""Large host memory in huge pages, where the kernel gives them to those that ask.

Streaming weights through 4 KiB pages misses the TLB all the time; 2 MiB pages were measured to
make a decode step on a CPU up to a fifth faster.  Linux usually hands them out on `madvise` only.
Does not know what the memory is for; where there is no `madvise`, it is ordinary memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64 and on AArch64 with 4 KiB base pages."""
ALIGNMENT = 64
"""What the CPU backend needs to use a host array in place, in bytes."""
CHUNK = 64 << 20
"""Bytes reserved at once; what is not touched costs address space only."""


class Arena:
    """Hands out pieces of huge-page regions; a region lives as long as any piece of it.

    `jax.device_put` of a piece is free on the CPU backend: the array is the piece.  Safe to use
    from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = np.empty(0, np.uint8)

    def allocate(self, size: int) -> npt.NDArray[np.uint8]:
        """`size` bytes of zeros, aligned to `ALIGNMENT`."""
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if padded > CHUNK // 4:
                return _region(padded)[:size]
            if padded > self._free.size:
                self._free = _region(CHUNK)
            piece, self._free = self._free[:size], self._free[padded:]
        return piece

    def copy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """A copy of the array in the arena, in C order."""
        place = self.allocate(array.nbytes).view(array.dtype).reshape(array.shape)
        place[...] = array
        return place


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike, sharding: Sharding) -> jax.Array:
    """An array of zeros for the device; on a CPU, memory is taken page by page when touched.

    The array is XLA's own, so it can be donated and updated in place, which memory that is only
    lent to XLA cannot.
    """
    array = jnp.zeros(shape, np.dtype(dtype), device=sharding)
    for shard in array.addressable_shards:
        if shard.device.platform == "cpu":
            _return_zeros(shard.data)
    return array


def trim() -> None:
    """Give memory that the C library keeps for later back to the system.

    Compiling and loading executables leaves hundreds of MB of it.
    """
    malloc_trim = _c_function("malloc_trim", ctypes.c_size_t)
    if malloc_trim is not None:
        malloc_trim(0)


def _region(size: int) -> npt.NDArray[np.uint8]:
    """Anonymous memory from a huge-page boundary on."""
    # Shared memory, mmap's default, gets huge pages under another setting only.
    region = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE
    return whole[start : start + size]


def _return_zeros(array: jax.Array) -> None:
    """Give the pages of an array of zeros back: they read as zeros, and come back as huge ones.

    Only whole pages inside the array are touched, and private anonymous memory is what XLA's CPU
    allocator uses, for which Linux promises zeros.
    """
    madvise = _madvise()
    if madvise is None:
        return
    array.block_until_ready()
    address = array.unsafe_buffer_pointer()
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (address + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size > HUGE_PAGE:
        madvise(start, size, mmap.MADV_HUGEPAGE)
        madvise(start, size, mmap.MADV_DONTNEED)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    if not (hasattr(mmap, "MADV_HUGEPAGE") and hasattr(mmap, "MADV_DONTNEED")):
        return None
    return _c_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _c_function(name: str, *arguments: Any) -> Callable[..., int] | None:
    """A function of the C library that returns an int, where there is such."""
    function: Any = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes = arguments
    return function  # type: ignore[no-any-return]

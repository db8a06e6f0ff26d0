"""Memory for large arrays: aligned, used in place by the CPU backend, and in huge pages."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.host_memory import ALIGNMENT, HUGE_PAGE, Arena, zeros

CPU = jax.devices("cpu")[0]
PLACE = jax.sharding.SingleDeviceSharding(CPU)
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def memory_at(address: int) -> dict[str, int]:
    """Fields of /proc/self/smaps, in bytes, for the mapping of an address."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.endswith("kB"):
            found[line.split(":")[0]] = int(line.split()[1]) * 1024
    return found


def flags_at(address: int) -> list[str]:
    """Flags of the mapping of an address; "hg" where huge pages were asked for."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if match and int(match[1], 16) <= address < int(match[2], 16):
            return next(line for line in lines if line.startswith("VmFlags:")).split()[1:]
    return []


def has_huge_pages() -> bool:
    return THP.is_file() and "[never]" not in THP.read_text()


def test_pieces_are_aligned_zero_and_disjoint():
    arena = Arena()
    sizes = [1, 63, 64, 65, 4096, 3 << 20, 20 << 20, 0, 100]
    pieces = [arena.allocate(size) for size in sizes]
    assert [piece.size for piece in pieces] == sizes
    assert all(piece.ctypes.data % ALIGNMENT == 0 for piece in pieces if piece.size)
    assert not any(piece.any() for piece in pieces)
    for number, piece in enumerate(pieces):
        piece[...] = number
    assert all((piece == number).all() for number, piece in enumerate(pieces))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8, np.uint16])
def test_the_cpu_backend_uses_a_piece_in_place(dtype):
    source = np.arange(3 * 40).reshape(3, 40).T.astype(dtype)  # not in C order
    piece = Arena().copy(source)
    array = jax.device_put(piece, PLACE)
    assert array.unsafe_buffer_pointer() == piece.ctypes.data
    assert (np.asarray(array) == source).all()


def test_a_region_lives_as_long_as_an_array_over_it():
    arena = Arena()
    arrays = [jax.device_put(arena.copy(np.full(1000, i, np.int32)), PLACE) for i in range(200)]
    del arena
    gc.collect()
    assert all((np.asarray(array) == i).all() for i, array in enumerate(arrays))


@pytest.mark.skipif(not has_huge_pages(), reason="the kernel gives no huge pages")
def test_large_pieces_lie_in_huge_pages():
    piece = Arena().allocate(20 << 20)
    assert piece.ctypes.data % HUGE_PAGE == 0
    assert "hg" in flags_at(piece.ctypes.data)


def test_zeros_are_zeros_that_can_be_donated():
    array = zeros((3, 5, 1 << 20), jnp.uint16, PLACE)
    assert (array.shape, array.dtype, array.sharding) == ((3, 5, 1 << 20), jnp.uint16, PLACE)
    assert not np.asarray(array).any()
    address = array.unsafe_buffer_pointer()
    add = jax.jit(lambda x: x.at[1, 2, 3].add(7), donate_argnums=0)
    changed = add(array)
    assert changed.unsafe_buffer_pointer() == address
    assert np.asarray(changed).sum() == 7


def test_small_zeros():
    assert not np.asarray(zeros((3,), jnp.float32, PLACE)).any()


@pytest.mark.skipif(not has_huge_pages(), reason="the kernel gives no huge pages")
def test_zeros_take_memory_when_they_are_touched():
    array = zeros((64 << 20,), jnp.uint8, PLACE)
    inside = -(-array.unsafe_buffer_pointer() // HUGE_PAGE) * HUGE_PAGE
    assert memory_at(inside)["Rss"] < 8 << 20
    assert "hg" in flags_at(inside)
    touched = jax.jit(lambda x: x.at[: 16 << 20].set(1), donate_argnums=0)(array)
    assert 14 << 20 <= memory_at(inside)["Rss"] <= 24 << 20
    assert int(touched.sum(dtype=jnp.int32)) == 16 << 20


def test_where_memory_cannot_be_advised(monkeypatch):
    from jaxserve import host_memory

    host_memory._madvise.cache_clear()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not Arena().allocate(100).any()
    assert not np.asarray(zeros((8 << 20,), jnp.uint8, PLACE)).any()
    host_memory._madvise.cache_clear()

"""Mosaic GPU's decode kernels, compiled by `ptxas` for chips that are not there.

The compiler reports what decides how many copies of a kernel share a multiprocessor and so how
many reads are in flight: registers, spills and shared memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from tests.deviceless import gpu
from tests.kernels.mosaic.llama_8b import BLOCK_KV, FORMS

TIMEOUT_S = 120
KIB = 1024


def reason() -> str | None:
    if jax.__version_info__ < (0, 11):
        return f"Mosaic GPU needs JAX 0.11, not {jax.__version__}"
    return gpu.missing()


pytestmark = pytest.mark.skipif(reason() is not None, reason=str(reason()))


@dataclass(frozen=True)
class Kernel:
    """What the compiler says of one kernel."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    ptx: str


@dataclass(frozen=True)
class Ceiling:
    """What a form of a kernel may use, of each thread's registers and of each block's memory."""

    registers: int
    shared_bytes: int


SMALL = Ceiling(168, 68 * KIB)
"""Three blocks of 128 threads share the 65536 registers and 228 KiB of an H100's core."""
CEILINGS = {
    "plain": SMALL,
    "over-4GiB": SMALL,
    "everything": Ceiling(192, 100 * KIB),
    "wide-head": Ceiling(192, 132 * KIB),
}
COMBINE = Ceiling(96, 0)
COPIES = {
    gpu.A100: "cp.async.cg",
    gpu.H100: "cp.async.bulk.tensor",
    gpu.B200: "cp.async.bulk.tensor",
}


@pytest.mark.parametrize(
    ("target", "form"),
    [
        (gpu.A100, "plain"),
        (gpu.A100, "everything"),
        (gpu.H100, "plain"),
        (gpu.H100, "everything"),
        (gpu.H100, "wide-head"),
        (gpu.H100, "over-4GiB"),
        (gpu.B200, "plain"),
    ],
    ids=str,
)
def test_kernels_fit_the_chip(target: gpu.Target, form: str, tmp_path: Path) -> None:
    report = gpu.in_child(
        "tests.deviceless.mosaic_decode",
        *(target.name, form),
        timeout_s=TIMEOUT_S,
        MOSAIC_GPU_DUMP_TO=str(tmp_path),
    )
    assert report["temp_bytes"] < report["cache_bytes"] / 4  # partials, and no copy of the cache
    decode, combine = kernel(tmp_path, "paged_decode"), kernel(tmp_path, "paged_combine")
    assert f".target sm_{target.capability[0]}0" in decode.ptx
    assert "mma.sync" in decode.ptx
    assert COPIES[target] in decode.ptx
    for used, ceiling in ((decode, CEILINGS[form]), (combine, COMBINE)):
        assert used.spilled_bytes == 0
        assert used.registers <= ceiling.registers
        assert used.shared_bytes <= ceiling.shared_bytes


def test_cp_async_waits_for_whole_blocks(tmp_path: Path) -> None:
    """The interpreter does not know this path: a wrong count of copies would show nowhere else."""
    gpu.in_child(
        "tests.deviceless.mosaic_decode",
        *(gpu.A100.name, "plain"),
        timeout_s=TIMEOUT_S,
        MOSAIC_GPU_DUMP_TO=str(tmp_path),
    )
    stages, copies = FORMS["plain"].num_stages, 2 * BLOCK_KV // FORMS["plain"].page_size
    ptx = kernel(tmp_path, "paged_decode").ptx
    assert ptx.count("cp.async.commit_group") == (stages + 1) * copies  # one of every copy
    waits = re.findall(r"cp.async.wait_group\s+(\d+)", ptx)
    assert waits == [str((stages - 1) * copies), "0"]


def kernel(dumped: Path, name: str) -> Kernel:
    """The dumps of the kernel called `name`."""
    (ptxas,) = dumped.glob(f"{name}_*.ptxas")
    text = ptxas.read_text()
    (shared,) = re.findall(
        r"smem_scratch_bytes=(\d+)", ptxas.with_suffix(".resources.txt").read_text()
    )
    return Kernel(
        registers=max(map(int, re.findall(r"Used (\d+) registers", text))),
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", text))),
        shared_bytes=int(shared),
        ptx=ptxas.with_suffix(".ptx").read_text(),
    )

"""Compiles the kernels with the system's compiler and keeps the library on disk.

A library is found again by its source, its compiler, its options and the headers of jaxlib; a
digest beside its code tells whether the file is what was written.  Nothing here loads it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

from pallas_kernels.cpu.instructions import InstructionSet

SOURCE = Path(__file__).parent / "src"
COMPILERS = ("g++", "c++", "clang++")
_OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_MAGIC = b"\n#jaxserve-sha256:"
_SECONDS = 300


class Unavailable(Exception):
    """Why there are no such kernels here, in words for a log line."""


def library(instructions: InstructionSet, directory: Path) -> Path:
    """The shared library of an instruction set, compiled now unless `directory` has it intact.

    Raises:
        Unavailable: there is no compiler, it fails, or nothing can be written.
    """
    compiler = find_compiler()
    path = _path(compiler, instructions, directory)
    if not _intact(path):
        _compile(compiler, instructions, path)
    return path


def find_compiler() -> str:
    """Path of the C++ compiler.

    Raises:
        Unavailable: there is none.
    """
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise Unavailable(f"no C++ compiler ({', '.join(COMPILERS)}) on the PATH; install g++")


def _path(compiler: str, instructions: InstructionSet, directory: Path) -> Path:
    return directory / f"kernels-{instructions.name}-{_key(compiler, instructions)}.so"


def _key(compiler: str, instructions: InstructionSet) -> str:
    stat = os.stat(compiler)  # its version, without running it
    parts = [str(os.path.realpath(compiler)), str(stat.st_size), str(stat.st_mtime_ns)]
    parts += [*_OPTIONS, *instructions.flags, jax.__version__]
    digest = hashlib.sha256("\n".join(parts).encode())
    for source in sorted(SOURCE.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _intact(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    code, mark, digest = content.rpartition(_MAGIC)
    return bool(mark) and hashlib.sha256(code).hexdigest().encode() == digest


def _compile(compiler: str, instructions: InstructionSet, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [compiler, *_OPTIONS, *instructions.flags, f"-I{jax.ffi.include_dir()}"]
            command += [str(SOURCE / "ops.cc"), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
                reason = (lines or done.stderr.splitlines() or ["it said nothing"])[0]
                raise Unavailable(f"{Path(compiler).name} cannot compile them: {reason}")
            code = built.read_bytes()
            # The loader reads what the headers point at and never gets to the end of the file.
            built.write_bytes(code + _MAGIC + hashlib.sha256(code).hexdigest().encode())
            os.replace(built, path)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{Path(compiler).name} took more than {_SECONDS} s") from None
    except OSError as error:
        raise Unavailable(f"they cannot be built in {path.parent}: {error}") from error

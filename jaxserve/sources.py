"""The package's own code as a key: what is cached belongs to the code that made it."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_KINDS = (".py", ".cc", ".h")


@functools.cache
def digest_of_sources(without: frozenset[str] = frozenset()) -> str:
    """Digest of the sources of `jaxserve` and `pallas_kernels`, kernels in C++ included.

    Args:
        without: names of subpackages that do not matter.
    """
    import jaxserve
    import pallas_kernels

    digest = hashlib.sha256()
    for package in (jaxserve, pallas_kernels):
        root = Path(next(iter(package.__path__)))
        for source in sorted(root.rglob("*")):
            if source.suffix in _KINDS and without.isdisjoint(source.relative_to(root).parts):
                digest.update(source.read_bytes())
    return digest.hexdigest()

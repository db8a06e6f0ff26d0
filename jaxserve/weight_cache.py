"""The weights as they are served, converted and packed, kept between starts.

One file per model, dtype and layout.  A file that is damaged, out of date or not there costs a
line and the work of a first start, nothing else.  Does not know how weights are packed.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.files import new_file
from jaxserve.weight_file import (
    Allocate,
    DamagedError,
    Place,
    TreePath,
    WeightWriter,
    read_weights,
)

log = logging.getLogger(__name__)


class WeightCache:
    """The file of one served model.

    Args:
        directory: where all of them are.
        name: the model's, the dtype's and the layout's, for people to read.
        origin: the files that the weights come from; other files are another model, and a
            change of these makes what is kept out of date.
        version: text that changes with everything else: configuration and code.

    Raises:
        OSError: a file of `origin` cannot be looked at.
    """

    def __init__(self, directory: Path, name: str, origin: Iterable[Path], version: str) -> None:
        paths = sorted(path.resolve() for path in origin)
        stats = [path.stat() for path in paths]
        when = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
        self._directory = directory
        readable = re.sub(r"[^\w.-]", "_", name)
        self._model = f"{readable}-{_digest(*map(str, paths))}"
        self._key = _digest(version, str(when))
        self.path = directory / f"{self._model}-{self._key}.weights"

    def read(self, allocate: Allocate, place: Place) -> dict[str, Any] | None:
        """The served tree, or None where there is no intact file; see `read_weights`."""
        try:
            return read_weights(self.path, self._key, allocate, place)
        except FileNotFoundError:
            return None
        except (DamagedError, OSError) as error:
            log.warning("making the weights anew: %s cannot be used: %s", self.path, error)
            return None

    def write(self, leaves: Iterable[tuple[TreePath, Any]]) -> None:
        """Keep the leaves of a served tree, in place of an earlier version; or say why not."""
        try:
            with new_file(self.path) as file:
                writer = WeightWriter(file, self._key)
                for path, leaf in leaves:
                    writer.add(path, jax.tree.map(np.asarray, leaf))
                writer.finish()
            self._remove_others()
        except OSError as error:
            log.warning("not keeping the weights for the next start: %s", error)

    def _remove_others(self) -> None:
        for other in self._directory.glob(f"{self._model}-*.weights"):
            if other != self.path:
                other.unlink(missing_ok=True)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]

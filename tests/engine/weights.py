"""Other weights for a shared runner, put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.llama import Params
from tests.engine.mini import Mini


def copy(params: Params) -> Any:
    """The weights as NumPy arrays that a test may write to."""
    return jax.tree.map(np.array, params)


@contextmanager
def serving(mini: Mini, params: Any) -> Iterator[None]:
    """Serve other weights with the compiled programs of `mini`; for fresh engines only."""
    before = mini.runner.params
    mini.engine().update_weights(jax.tree.map(jnp.asarray, params))
    try:
        yield
    finally:
        mini.engine().update_weights(before)

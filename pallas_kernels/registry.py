"""Implementations of the operations by name, and the choice of one by platform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from pallas_kernels.layout import KVLayout
from pallas_kernels.plan import Plan


@dataclass(frozen=True)
class AttentionOptions:
    """The static arguments of one attention call; see `ragged_paged_attention`."""

    layout: KVLayout
    sm_scale: float
    split: bool
    block_q: int
    block_kv: int
    window: int | None
    soft_cap: float | None


Attention = Callable[
    [jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, Plan | None, AttentionOptions],
    jax.Array,
]
Write = Callable[
    [
        jax.Array,
        jax.Array,
        jax.Array,
        jax.Array,
        KVLayout,
        jax.Array | None,
        jax.Array | None,
    ],
    jax.Array,
]


@dataclass(frozen=True)
class Implementation:
    """One way to run the operations."""

    name: str
    attention: Attention
    write: Write
    platforms: tuple[str, ...]
    """Platforms on which "auto" may choose it."""


def implementations() -> dict[str, Implementation]:
    """All implementations by name, those preferred by "auto" first."""
    from pallas_kernels import xla

    known = (Implementation("xla", xla.attention, xla.write, ("cpu", "gpu", "tpu")),)
    return {implementation.name: implementation for implementation in known}


def choose(name: str, platform: str) -> Implementation:
    """The implementation called `name`, or the preferred one of `platform` for "auto".

    Raises:
        ValueError: there is no implementation of that name.
    """
    known = implementations()
    if name == "auto":
        return next(i for i in known.values() if platform in i.platforms)
    if name not in known:
        raise ValueError(f"no attention implementation {name!r}; known are {', '.join(known)}")
    return known[name]

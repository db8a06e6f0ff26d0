"""Implementations of the operations by name, and the choice of one by layout and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax

from pallas_kernels.layout import KVLayout, KVPages
from pallas_kernels.plan import Plan
from pallas_kernels.tuning import Launch


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
    launch: Launch


Attention = Callable[
    [
        jax.Array,  # q
        KVPages,
        jax.Array,  # block_tables
        jax.Array,  # kv_lens
        jax.Array,  # cu_q_lens
        Plan,
        jax.Array | None,  # sinks
        AttentionOptions,
    ],
    jax.Array,
]
Write = Callable[
    [
        jax.Array,  # k
        jax.Array,  # v
        jax.Array,  # slots
        KVPages,
        KVLayout,
        jax.Array | None,  # cos
        jax.Array | None,  # sin
    ],
    KVPages,
]


Fused = Callable[
    [
        jax.Array,  # qkv
        jax.Array,  # used
        jax.Array,  # cos
        jax.Array,  # sin
        jax.Array,  # slots
        KVPages,
        jax.Array,  # block_tables
        jax.Array,  # decode_lens
        jax.Array,  # chunk_kv_lens
        jax.Array,  # chunk_cu_lens
        jax.Array | None,  # sinks
        AttentionOptions,
    ],
    tuple[jax.Array, KVPages],
]
"""A step's whole attention of one layer: rotate, write the cells, attend.

`qkv` is f32[rows, kv_heads, group + 2, head_dim]: the queries, the key and the value of each KV
head, none of them rotated; `cos` and `sin` are f32[rows, head_dim / 2] and `slots` as in
`kv_write`.  The first rows are one token of each sequence, with `decode_lens` keys (0 for none);
the rows after them are chunk tokens, as `cu_q_lens` and `kv_lens` of `ragged_paged_attention` say.
Of all these only the first `used`, i32[], are wanted.
Returns attention as [rows, q_heads, head_dim] in the type of the pages, and the pages.
"""


@dataclass(frozen=True)
class Use:
    """What a caller wants an implementation for."""

    layout: KVLayout
    group: int = 1
    """Query heads per KV head."""
    sinks: bool = False
    compute_capability: tuple[int, int] | None = None
    """Of the NVIDIA GPU it will run on; `None` if there is none or it is not known."""


def compute_capability(device: jax.Device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU; `None` for any other device."""
    version = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or version is None:
        return None
    major, minor = str(version).split(".")
    return int(major), int(minor)


def _same(layout: KVLayout) -> KVLayout:
    return layout


def _all_pages(layout: KVLayout, pages: int) -> int:
    return pages


def _anything(use: Use) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to run the operations."""

    name: str
    attention: Attention
    write: Write
    platforms: tuple[str, ...]
    """Platforms it runs on."""
    automatic: tuple[str, ...]
    """Platforms on which "auto" may choose it."""
    tiled: bool = False
    """Its blocks are tiles in a GPU's registers: their sizes come from the device's table."""
    layout: Callable[[KVLayout], KVLayout] = _same
    """The layout it needs, given the plain one of the same sizes."""
    most_pages: Callable[[KVLayout, int], int] = _all_pages
    """The most pages, no more than those asked for, that it can read in one device's cache."""
    fused: Fused | None = None
    """The three operations of a step's layer in one call, if it has that."""
    refusal: Callable[[Use], str | None] = _anything
    """The limit that a use exceeds, in words that follow the implementation's name; or None."""

    def refuses(self, use: Use) -> str | None:
        """Why it cannot serve `use`, platform included, or None if it can."""
        if use.layout.platform not in self.platforms:
            runs_on = " and ".join(self.platforms)
            return f"runs on {runs_on}, not on {use.layout.platform}"
        return self.refusal(use)


def implementations() -> dict[str, Implementation]:
    """All implementations by name, those preferred by "auto" first."""
    from pallas_kernels import dense, mosaic, tpu, triton, xla
    from pallas_kernels.cpu import attention as cpu
    from pallas_kernels.cpu import best_first
    from pallas_kernels.cpu.layout import cpu_layout
    from pallas_kernels.tpu_layout import tpu_layout

    everywhere = ("cpu", "gpu", "tpu")
    on_gpu = ("gpu",)
    interpreted = (partial(triton.attention, interpret=True), partial(triton.write, interpret=True))
    on_tpu = ("tpu",)
    on_cpu = ("cpu",)
    compiled = (
        Implementation(
            name=cpu_name(instructions.name),
            platforms=on_cpu,
            automatic=(),  # a caller that has built them knows their name
            layout=cpu_layout,
            **cpu.forms(instructions.name),
        )
        for instructions in best_first()
    )
    known = (
        *compiled,
        Implementation(
            "pallas_triton",
            triton.attention,
            triton.write,
            on_gpu,
            on_gpu,
            tiled=True,
            most_pages=triton.most_pages,
            refusal=triton.refusal,
        ),
        Implementation(
            "tpu", tpu.attention, xla.write, on_tpu, on_tpu, layout=tpu_layout, refusal=tpu.refusal
        ),
        Implementation("xla", xla.attention, xla.write, everywhere, everywhere, layout=tpu_layout),
        Implementation(
            "pallas_mgpu",
            mosaic.attention,
            mosaic.write,
            on_gpu,
            (),
            tiled=True,
            most_pages=triton.most_pages,
            refusal=mosaic.refusal,
        ),
        Implementation("reference", dense.attention, xla.write, everywhere, ()),
        Implementation(
            "pallas_interpret",
            *interpreted,
            ("cpu", "gpu"),
            (),
            tiled=True,
            refusal=triton.refusal,
        ),
    )
    return {implementation.name: implementation for implementation in known}


def cpu_name(instructions: str) -> str:
    """Name of the implementation by the CPU kernels of an instruction set."""
    return f"cpu_{instructions}"


def select(name: str, use: Use) -> tuple[Implementation, KVLayout]:
    """The implementation for a cache that is yet to be made, and the layout it needs.

    Args:
        name: a name in `implementations()`, or "auto" for the preferred one of the platform.
        use: with the plain layout of the wanted sizes.

    Raises:
        ValueError: as `choose`.
    """
    if name == "auto":
        for chosen in implementations().values():
            if use.layout.platform in chosen.automatic and chosen.refuses(use) is None:
                return chosen, chosen.layout(use.layout)
    chosen = choose(name, use)
    return chosen, chosen.layout(use.layout)


def choose(name: str, use: Use) -> Implementation:
    """The implementation called `name`, or for "auto" the preferred one that can serve `use`.

    Raises:
        ValueError: there is no implementation of that name, or it cannot serve `use`; names the
            limit.
    """
    known = implementations()
    if name == "auto":
        able = (
            i
            for i in known.values()
            if use.layout.platform in i.automatic
            and i.layout(use.layout) == use.layout
            and i.refuses(use) is None
        )
        return next(able, known["xla"])  # which reads every layout
    if name not in known:
        raise ValueError(f"no attention implementation {name!r}; known are {', '.join(known)}")
    chosen = known[name]
    reason = chosen.refuses(use)
    if reason is not None:
        raise ValueError(f"attention implementation {name!r} {reason}")
    return chosen

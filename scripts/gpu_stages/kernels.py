"""One implementation's attention and write on the device, against the oracles, in poisoned pages.

Poison is what cells that no sequence owns hold.  NaN there must not be seen, and another poison
must not change a bit.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    Implementation,
    KVLayout,
    KVPages,
    Use,
    compute_capability,
    implementations,
    items_bound,
    kv_write,
    make_plan,
    ragged_paged_attention,
    split_items_bound,
)
from pallas_kernels.tuning import sizes
from scripts.gpu_stages.context import Context, short
from scripts.gpu_stages.kernel_cases import NUM_SEQS, Case, Config, make_case

Check = Callable[[Config, Implementation], dict[str, Any]]
LLAMA, SMOL = (32, 8, 128), (9, 3, 64)
CONFIGS = [
    Config("decode", LLAMA),
    Config("decode", LLAMA, cells="int8"),
    Config("prefill", LLAMA),
    Config("decode", LLAMA, cells="fp8"),
    Config("decode", SMOL),
    Config("verify", LLAMA),
    Config("prefill", SMOL, window=100, soft_cap=20.0),
    Config("decode", (8, 1, 128), page_size=64),
    Config("decode", (4, 4, 64), page_size=32, cells="float32"),
    Config("decode", (14, 2, 64), page_size=128, window=100),
    Config("decode", LLAMA, soft_cap=20.0),
    Config("decode", (16, 2, 64), window=128, sinks=True),
    Config("decode", (8, 4, 256), page_size=32),
    Config("decode", (12, 4, 80)),
    Config("decode", (4, 2, 32), cells="float32"),
    Config("verify", LLAMA, cells="int8"),
    Config("prefill", LLAMA, cells="int8"),
    Config("prefill", (8, 8, 64), cells="float32", sinks=True),
    Config("prefill", (8, 1, 64), cells="fp8", page_size=64),
    Config("prefill", (8, 4, 256), page_size=32),
]
SMALL = [Config("decode", SMOL), Config("prefill", (4, 2, 32), cells="float32", sinks=True)]
WRITES = [Config("decode", LLAMA), Config("decode", LLAMA, cells="int8"), Config("decode", SMOL)]
_CASES = 4
_WORKERS = 4
_WRITE_ROWS = 33


def run(context: Context) -> None:
    """Check every configuration; a failure or a refusal of one leaves the others alone."""
    implementation = implementations()[context.argument]
    checks: list[dict[str, Any]] = []
    result = {"implementation": implementation.name, "checks": checks, "complete": False}
    todo: list[tuple[Config, Check]] = [
        (config, _check_attention) for config in (SMALL if context.small else CONFIGS)
    ]
    todo += [(config, _check_write) for config in (WRITES[:1] if context.small else WRITES)]
    lock = threading.Lock()

    def check(config: Config, of: Check) -> None:
        what = f"write {config}" if of is _check_write else str(config)
        # Said beforehand, so that a hang has a name.
        row: dict[str, Any] = {"config": what, "passed": False, "error": "did not come back"}
        with lock:
            checks.append(row)
            context.save(result)
        try:
            found = {"error": None, **of(config, implementation)}
        except Exception as error:  # the other configurations still have something to say
            found = {"error": short(error)}
        with lock:
            row |= found
            context.save(result)

    # Most of the time is compilation, on the host.
    with ThreadPoolExecutor(1 if context.small else _WORKERS) as pool:
        list(pool.map(check, *zip(*todo, strict=True)))
    result["complete"] = True
    context.save(result)


def _check_attention(config: Config, implementation: Implementation) -> dict[str, Any]:
    layout, refused = _layout(config, implementation)
    if refused is not None:
        return {"passed": None, "refused": refused}
    call = _attention(config, implementation, layout)
    worst, same, zeros = 0.0, True, True
    for seed in range(_CASES):
        case = make_case(config, seed)
        out = _answer(call, case, layout, np.nan)
        worst = float(np.maximum(worst, np.abs(out.astype(np.float64) - case.want).max()))
        zeros &= not out[~case.live].any()
        same &= np.array_equal(_bits(out), _bits(_answer(call, case, layout, 1e4)))
    return {
        "largest_error": worst,
        "tolerance": config.tolerance,
        "poison_changes_nothing": bool(same),
        "other_rows_are_zero": bool(zeros),
        "passed": bool(worst < config.tolerance and same and zeros),
    }


def _layout(config: Config, implementation: Implementation) -> tuple[KVLayout, str | None]:
    """The plain layout, and why the implementation cannot serve it."""
    device = jax.devices()[0]
    q_heads, kv_heads, _ = config.heads
    layout = config.layout(device.platform)
    use = Use(layout, q_heads // kv_heads, config.sinks, compute_capability(device))
    refused = implementation.refuses(use)
    if refused is None and implementation.layout(layout) != layout:
        refused = "has a layout of its own"
    return layout, refused


def _attention(
    config: Config, implementation: Implementation, layout: KVLayout
) -> Callable[..., jax.Array]:
    """The operation as the engine calls it, compiled once for all data."""
    device = jax.devices()[0]
    q_heads, kv_heads, head_dim = config.heads
    both = sizes(
        "gpu" if implementation.tiled else device.platform,
        device.device_kind,
        head_dim,
        q_heads // kv_heads,
        config.page_size,
        str(layout.cell_dtype),
        config.longest,
        None,
    )
    split = config.form != "prefill"
    tuned = both.decode if split else both.prefill
    block_q = config.rows // NUM_SEQS if split else tuned.block_q
    num_items = items_bound(config.rows, NUM_SEQS, block_q)
    if split:
        assert tuned.chunk_kv is not None
        num_items = split_items_bound(
            NUM_SEQS, config.longest, tuned.chunk_kv, config.window, block_q
        )

    @jax.jit
    def call(
        q: jax.Array,
        pages: KVPages,
        tables: jax.Array,
        kv_lens: jax.Array,
        cu_q_lens: jax.Array,
        sinks: jax.Array | None,
    ) -> jax.Array:
        plan = make_plan(
            kv_lens,
            cu_q_lens[1:] - cu_q_lens[:-1],
            num_items=num_items,
            block_q=block_q,
            chunk_kv=tuned.chunk_kv,
            window=config.window,
        )
        return ragged_paged_attention(
            q,
            pages,
            tables,
            kv_lens,
            cu_q_lens,
            plan,
            layout=layout,
            sm_scale=head_dim**-0.5,
            split=split,
            block_q=block_q,
            block_kv=tuned.block_kv,
            window=config.window,
            soft_cap=config.soft_cap,
            sinks=sinks,
            launch=tuned.launch,
            implementation=implementation.name,
        )

    return call


def _answer(call: Callable[..., jax.Array], case: Case, layout: KVLayout, poison: float) -> Any:
    return np.asarray(
        call(
            case.queries(poison),
            case.pages(layout, poison),
            case.tables,
            case.kv_lens,
            case.cu_q_lens,
            case.sinks,
        )
    )


def _check_write(config: Config, implementation: Implementation) -> dict[str, Any]:
    """Rotated keys and values in their cells, as the XLA write leaves them, and nothing else."""
    layout, refused = _layout(config, implementation)
    if refused is not None:
        return {"passed": None, "refused": refused}
    _, kv_heads, head_dim = config.heads
    rng = np.random.default_rng(0)
    k, v = (
        jnp.asarray(rng.standard_normal((_WRITE_ROWS, kv_heads, head_dim)), config.dtype)
        for _ in range(2)
    )
    angle = rng.uniform(0, 6, (_WRITE_ROWS, head_dim // 2)).astype(np.float32)
    num_pages = 7
    slots = rng.permutation(num_pages * config.page_size)[:_WRITE_ROWS].astype(np.int32)
    slots[::4] = -1
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    write = functools.partial(kv_write, layout=layout, cos=cos, sin=sin)

    def written(name: str) -> KVPages:
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layout.abstract(num_pages))
        run = jax.jit(functools.partial(write, implementation=name), donate_argnums=3)
        return KVPages(*jax.tree.map(np.asarray, run(k, v, slots, empty)))

    got, want = (_numbers(layout, written(name)) for name in (implementation.name, "xla"))
    untouched = ~want.any(axis=(1, 2, 4))
    error = float(np.abs(got - want).max())
    # One step of the type: the two may round a rotated key differently.
    step = {"int8": 1 / 127, "fp8": 1 / 16}.get(config.cells, 1 / 128) * float(np.abs(want).max())
    clean = not got.swapaxes(2, 3).swapaxes(1, 2)[untouched].any()
    return {
        "largest_error": error,
        "tolerance": step,
        "other_cells_untouched": clean,
        "passed": bool(error <= step and clean),
    }


def _numbers(layout: KVLayout, pages: KVPages) -> Any:
    """The cache as numbers, `[pages, 2, kv_heads, page_size, head_dim]`."""
    cells = np.asarray(layout.as_cells(jnp.asarray(pages.cells))).astype(np.float64)
    return cells if pages.scales is None else cells * np.asarray(pages.scales)[..., None]


def _bits(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint8)

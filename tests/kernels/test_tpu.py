"""The TPU implementation around a model of the in-tree kernel, against the NumPy oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as package

from pallas_kernels import KVLayout, KVPages, Use, choose, make_plan, tpu
from pallas_kernels.registry import AttentionOptions, select
from pallas_kernels.tpu_layout import tpu_layout
from pallas_kernels.tuning import DEFAULT_LAUNCH
from tests.kernels import tpu_model
from tests.kernels.paged import (
    BLOCK_Q,
    CHUNK_ROWS,
    NUM_SEQS,
    Array,
    Case,
    Config,
    error,
    expected,
    make_case,
    pages,
    same_bits,
)
from tests.kernels.test_tpu_layout import as_tpu

SMOLLM2 = Config(9, 3, 64, 16, "bfloat16")
WINDOWED = Config(12, 4, 128, 8, "float32", window=11, soft_cap=1.5)
PADDED = Config(10, 5, 80, 16, "float32")
CONFIGS = [SMOLLM2, WINDOWED, PADDED]
RATIOS = [(1, 1), (4, 4), (8, 1), (32, 1), (14, 2), (9, 3), (12, 4)]
PLAIN = KVLayout(np.dtype(jnp.bfloat16), 8, 128, 16, "tpu")

each_config = pytest.mark.parametrize("config", CONFIGS, ids=str)
each_form = pytest.mark.parametrize("split", [True, False], ids=["decode", "chunk"])


@functools.cache
def compiled(config: Config, split: bool) -> Callable[..., tuple[jax.Array, jax.Array]]:
    options = AttentionOptions(
        layout=tpu_layout(config.layout("tpu")),
        sm_scale=config.head_dim**-0.5,
        split=split,
        block_q=BLOCK_Q,
        block_kv=2 * config.page_size,
        window=config.window,
        soft_cap=config.soft_cap,
        launch=DEFAULT_LAUNCH,
    )

    def run(
        q: jax.Array, cells: jax.Array, tables: jax.Array, kv_lens: jax.Array, cu: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        met = []

        def in_tree(*arguments: jax.Array, **sizes: Any) -> jax.Array:
            met.append(tpu_model.meets_contract(*arguments))
            return tpu_model.in_tree(*arguments, **sizes)

        plan = make_plan(kv_lens, cu[1:] - cu[:-1], num_items=1, block_q=BLOCK_Q)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tpu, "in_tree", in_tree)
            out = tpu.attention(q, KVPages(cells), tables, kv_lens, cu, plan, None, options)
        return out, met[0]

    return jax.jit(run)


def attend(config: Config, split: bool, case: Case, *, seed: int = 0, poison: float = 0.0) -> Array:
    cells, tables = pages(config, case, seed=seed, poison=poison)
    first_key = np.arange(tables.shape[1]) * config.page_size
    tables = np.where(first_key < case.kv_lens[:, None], tables, 1 << 20)  # no such page
    held = as_tpu(tpu_layout(config.layout("tpu")), cells, padding_of_free_cells=poison)
    call = compiled(config, split)
    out, met = call(case.q, held, tables, case.kv_lens, case.cu_q_lens)
    assert met, "the kernel was called with holes"
    assert call._cache_size() == 1  # type: ignore[attr-defined]
    return np.asarray(out)


def random_case(config: Config, split: bool, rng: np.random.Generator) -> Case:
    """Any lengths and holes; inactive sequences may have rows, active ones may have none."""
    num_rows = NUM_SEQS if split else CHUNK_ROWS
    share = np.where(rng.random(NUM_SEQS) < 0.4, 0, 1 / NUM_SEQS)
    q_lens = rng.multinomial(num_rows, [*share, max(0, 1 - share.sum())])[:NUM_SEQS]
    if split and rng.random() < 0.5:
        q_lens = np.ones(NUM_SEQS, int)
    q_lens = np.minimum(q_lens, config.longest)
    kv_lens = [int(rng.integers(n, config.longest + 1)) for n in q_lens]
    for hole in np.flatnonzero(rng.random(NUM_SEQS) < rng.choice([0, 0.3, 1], p=[0.4, 0.5, 0.1])):
        kv_lens[hole] = 0
    return make_case(config, kv_lens, q_lens.tolist(), num_rows, int(rng.integers(1 << 30)))


def poisoned(case: Case, poison: float) -> Case:
    """The case with poison in the queries of no active sequence."""
    q = case.q.copy()
    q[~active_rows(case)] = poison
    return replace(case, q=q)


def active_rows(case: Case) -> Array:
    active = np.zeros(len(case.q), bool)
    active[: int(case.cu_q_lens[-1])] = np.repeat(case.kv_lens > 0, case.q_lens)
    return active


@each_form
@each_config
def test_equals_the_oracle_with_nan_in_every_other_cell(config: Config, split: bool) -> None:
    rng = np.random.default_rng(0)
    holes = 0
    for _ in range(60):
        case = random_case(config, split, rng)
        got = attend(config, split, poisoned(case, np.nan), poison=np.nan)
        assert error(got, expected(config, case)) < config.tolerance
        assert not got[~active_rows(case)].any(), "rows of no active sequence are not zero"
        holes += not active_rows(case).any()
    assert holes, "no case without any active sequence"


@pytest.mark.parametrize(("q_heads", "kv_heads"), RATIOS)
def test_any_ratio_of_heads(q_heads: int, kv_heads: int) -> None:
    """Query heads of padded KV heads are computed too, and cut off again (B08)."""
    config = Config(q_heads, kv_heads, 64, 16, "float32")
    rng = np.random.default_rng(2)
    for _ in range(10):
        case = random_case(config, True, rng)
        got = attend(config, True, poisoned(case, np.nan), poison=np.nan)
        assert error(got, expected(config, case)) < config.tolerance


@each_form
@each_config
def test_not_a_bit_depends_on_cells_that_no_sequence_owns(config: Config, split: bool) -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        case = random_case(config, split, rng)
        clean = attend(config, split, case)
        dirty = attend(config, split, poisoned(case, 1e4), poison=1e4)
        assert same_bits(dirty, clean)


@pytest.mark.parametrize("config", [SMOLLM2, WINDOWED], ids=str)
def test_the_model_equals_the_in_tree_reference(config: Config) -> None:
    """JAX's own reference is eager, and slow for it: two sequences are enough."""
    layout = tpu_layout(config.layout("tpu"))
    case = make_case(config, [config.longest, 17], [2, 17], CHUNK_ROWS)
    cells, tables = pages(config, case)
    held = jnp.asarray(as_tpu(layout, cells))
    shape = (CHUNK_ROWS, held.shape[2] // 2 * config.q_heads // config.kv_heads, held.shape[3])
    q = jnp.asarray(np.random.default_rng(0).standard_normal(shape)).astype(config.dtype)
    arguments = q, held, *map(jnp.asarray, (case.kv_lens, tables, case.cu_q_lens, np.int32([2])))
    options = {
        "sm_scale": config.head_dim**-0.5,
        "sliding_window": config.window,
        "soft_cap": config.soft_cap,
    }
    want = package.ref_ragged_paged_attention(*arguments, **options)
    blocks = {"num_kv_pages_per_block": 2, "num_queries_per_block": 8}
    got = np.asarray(tpu_model.in_tree(*arguments, **options, **blocks))
    assert error(got[: len(want)], np.asarray(want, np.float64)) < config.tolerance
    assert np.isnan(got[len(want) :]).all()


def trace(plain: KVLayout, seqs: int, pages_per_seq: int, devices: int = 1) -> None:
    layout = tpu_layout(plain)
    options = AttentionOptions(
        layout, 1.0, True, 1, 256, window=None, soft_cap=None, launch=DEFAULT_LAUNCH
    )
    cells = layout.abstract(9).cells
    shape = (*cells.shape[:2], cells.shape[2] // devices, cells.shape[3])
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def run(*arrays: jax.Array) -> jax.Array:
        q, cells, tables, kv_lens, cu = arrays
        plan = make_plan(kv_lens, kv_lens, num_items=1, block_q=1)
        return tpu.attention(q, KVPages(cells), tables, kv_lens, cu, plan, None, options)

    jax.eval_shape(
        run,
        jax.ShapeDtypeStruct((seqs, plain.num_kv_heads // devices, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        ints((seqs, pages_per_seq)),
        ints((seqs,)),
        ints((seqs + 1,)),
    )


def test_block_tables_that_do_not_fit_the_scalar_memory_are_refused_when_traced() -> None:
    with pytest.raises(ValueError, match="512 pages take 1048576 bytes of scalar memory"):
        trace(PLAIN, seqs=512, pages_per_seq=512)


def test_shares_of_heads_that_do_not_fill_tiles_are_refused_when_traced() -> None:
    with pytest.raises(ValueError, match="cannot split 24 KV heads into shares of 12"):
        trace(replace(PLAIN, num_kv_heads=24), seqs=8, pages_per_seq=8, devices=2)


def test_auto_takes_it_on_a_tpu_in_its_own_layout() -> None:
    chosen, layout = select("auto", Use(PLAIN, group=4))
    assert chosen.name == "tpu"
    assert layout == tpu_layout(PLAIN) != PLAIN
    assert choose("auto", Use(layout, group=4)).name == "tpu"
    assert choose("auto", Use(PLAIN, group=4)).name == "xla"


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (Use(replace(PLAIN, quantized=np.dtype(np.int8))), "not one per token: no int8 pages"),
        (Use(replace(PLAIN, dtype=np.dtype(np.float16))), "takes bfloat16 pages, not float16"),
        (Use(replace(PLAIN, dtype=np.dtype(np.float32))), "takes bfloat16 pages, not float32"),
        (Use(PLAIN, sinks=True), "has no attention sinks"),
        (Use(replace(PLAIN, head_dim=256)), "takes head sizes up to 128, not 256"),
    ],
    ids=["int8", "float16", "float32", "sinks", "head_dim"],
)
def test_what_it_cannot_do_is_refused_by_name_and_left_to_xla_by_auto(
    use: Use, reason: str
) -> None:
    with pytest.raises(ValueError, match=f"'tpu' .*{reason}"):
        select("tpu", use)
    chosen, layout = select("auto", use)
    assert (chosen.name, layout) == ("xla", tpu_layout(use.layout))


def test_it_runs_on_a_tpu_only() -> None:
    with pytest.raises(ValueError, match="'tpu' runs on tpu, not on cpu"):
        select("tpu", Use(replace(PLAIN, platform="cpu")))

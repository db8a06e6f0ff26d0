"""Attention of the CPU kernels: against the oracle, and what no bit of it may depend on."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVPages, cpu_name, kv_write
from pallas_kernels.cpu.attention import attention, rotate_write_attend
from pallas_kernels.cpu.layout import cpu_layout
from pallas_kernels.registry import AttentionOptions
from pallas_kernels.rows import rotate_half
from pallas_kernels.tuning import DEFAULT_LAUNCH
from tests.kernels.cpu_kernels import NAMES, need
from tests.kernels.paged import (
    NUM_PAGES,
    NUM_SEQS,
    PAGES_PER_SEQ,
    Case,
    Config,
    Form,
    attend,
    error,
    expected,
    make_case,
    random_case,
    same_bits,
)
from tests.kernels.test_attention import answers, cases, check_equals_the_oracle, poisoned
from tests.kernels.test_invariance import check_poison

SMOL = Config(9, 3, 64, 64, "bfloat16")
CONFIGS = [
    SMOL,
    Config(9, 3, 64, 16, "bfloat16"),
    Config(14, 2, 64, 16, "bfloat16", window=70, soft_cap=5.0, sinks=True, decode_rows=3),
    Config(32, 1, 80, 64, "bfloat16", window=17),
    Config(4, 4, 128, 32, "bfloat16", sinks=True),
    Config(3, 1, 256, 48, "bfloat16", soft_cap=50.0, decode_rows=4),
    Config(2, 1, 16, 128, "bfloat16"),
]
RANDOM_CASES = 60

both_forms = pytest.mark.parametrize("split", [True, False], ids=["decode", "chunk"])
each_config = pytest.mark.parametrize("config", CONFIGS, ids=str)
each_set = pytest.mark.parametrize("name", NAMES)


def form_of(name: str, split: bool) -> Form:
    return Form(split, "cpu", cpu_name(need(name)))


@each_set
@each_config
@both_forms
def test_equals_the_oracle(name: str, config: Config, split: bool) -> None:
    form = form_of(name, split)
    for case, want in answers(config, split):
        check_equals_the_oracle(config, form, case, want)


@each_set
@each_config
@both_forms
def test_equals_the_oracle_for_any_lengths(name: str, config: Config, split: bool) -> None:
    form, rng = form_of(name, split), np.random.default_rng(0)
    for _ in range(RANDOM_CASES):
        case = poisoned(random_case(config, split, rng), np.nan)
        check_equals_the_oracle(config, form, case, expected(config, case))


@each_set
@each_config
@both_forms
def test_not_a_bit_depends_on_cells_of_no_sequence(name: str, config: Config, split: bool) -> None:
    for case in cases(config, split):
        check_poison(config, form_of(name, split), case)


@each_set
@both_forms
def test_not_a_bit_depends_on_neighbours_or_place(name: str, split: bool) -> None:
    form, rng = form_of(name, split), np.random.default_rng(1)
    case = random_case(SMOL, split, rng)
    together = attend(SMOL, form, case)
    for seq in range(NUM_SEQS):
        for place in range(NUM_SEQS) if not split else [seq]:
            alone = case.alone(seq, place)
            got = attend(SMOL, form, alone, seed=place, poison=np.nan)
            assert same_bits(got[alone.rows(place)], together[case.rows(seq)])


@each_set
@pytest.mark.parametrize("config", [SMOL, CONFIGS[2]], ids=str)
def test_token_by_token_equals_one_chunk_bit_by_bit(name: str, config: Config) -> None:
    """However a prompt is cut, and whether its tokens were decoded or prefilled."""
    length = min(config.longest, 150)
    whole = make_case(config, [length], [48], 48, seed=3)
    want = attend(config, form_of(name, False), whole)
    for cut in (1, 7, 31):
        first = Case(whole.q, (whole.k[0][: length - 48 + cut],), (whole.v[0],), (cut,)).padded()
        first = replace(first, v=(whole.v[0][: length - 48 + cut], *first.v[1:]))
        got = attend(config, form_of(name, False), first, poison=np.nan)
        assert same_bits(got[:cut], want[:cut])
    for row in range(0, 48, 5):
        q = np.zeros((config.num_rows(True), *whole.q.shape[1:]), whole.q.dtype)
        q[0] = whole.q[row]
        keys = slice(length - 48 + row + 1)
        step = Case(q, (whole.k[0][keys],), (whole.v[0][keys],), (1,)).padded()
        got = attend(config, form_of(name, True), step, poison=np.nan)
        assert same_bits(got[0], want[row])


def random_pages(config: Config, rng: np.random.Generator) -> KVPages:
    layout = cpu_layout(config.layout("cpu"))
    shape = layout.abstract(NUM_PAGES).cells.shape
    numbers = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    return KVPages(layout.as_stored(numbers))


@each_set
@each_config
def test_write_is_the_layouts_store(name: str, config: Config) -> None:
    """Plain XLA says where a cell is; negative slots write nothing."""
    rng = np.random.default_rng(0)
    layout = cpu_layout(config.layout("cpu"))
    before = random_pages(config, rng)
    k, v = rng.standard_normal((2, 12, config.kv_heads, config.head_dim)).astype(np.float32)
    slots = rng.permutation(NUM_PAGES * config.page_size)[:12].astype(np.int32)
    slots[[2, 7]] = -1
    want = layout.store(before, jnp.asarray(k), jnp.asarray(v), jnp.asarray(slots))
    got = kv_write(k, v, slots, before, layout=layout, implementation=cpu_name(need(name)))
    assert same_bits(np.asarray(got.cells), np.asarray(want.cells))
    keys, values = layout.load(got, jnp.asarray(slots[:1] // config.page_size))
    at = slots[0] % config.page_size
    assert same_bits(np.asarray(keys[0, :, at]), np.asarray(k[0], keys.dtype))
    assert same_bits(np.asarray(values[0, :, at]), np.asarray(v[0], keys.dtype))


def options(config: Config) -> AttentionOptions:
    layout = cpu_layout(config.layout("cpu"))
    sizes = {"split": True, "block_q": 1, "block_kv": 64, "launch": DEFAULT_LAUNCH}
    limits = {"window": config.window, "soft_cap": config.soft_cap}
    return AttentionOptions(layout=layout, sm_scale=config.head_dim**-0.5, **sizes, **limits)


@each_set
@pytest.mark.parametrize("config", [SMOL, CONFIGS[3]], ids=str)
def test_fused_equals_its_three_operations(name: str, config: Config) -> None:
    rng = np.random.default_rng(5)
    kernels, chunk, size = need(name), 20, config.page_size
    layout, group = cpu_layout(config.layout("cpu")), config.q_heads // config.kv_heads
    tables = 1 + rng.permutation(NUM_PAGES - 1)[: NUM_SEQS * PAGES_PER_SEQ]
    tables = tables.reshape(NUM_SEQS, PAGES_PER_SEQ).astype(np.int32)
    decode_lens = rng.integers(1, config.longest + 1, NUM_SEQS).astype(np.int32)
    decode_lens[[1, 4, 5]] = 0
    chunk_lens = np.zeros(NUM_SEQS, np.int32)
    chunk_lens[[4, 5]] = 11, 6  # three chunk rows are padding
    chunk_kv = np.where(chunk_lens > 0, chunk_lens + 9, 0).astype(np.int32)
    cu = np.concatenate([[0], np.cumsum(chunk_lens)]).astype(np.int32)
    position = [(s, n - 1) for s, n in enumerate(decode_lens)]
    position += [(s, 9 + i) for s in (4, 5) for i in range(chunk_lens[s])] + [(0, -1)] * 3
    slots = np.array(
        [tables[s, t // size] * size + t % size if t >= 0 else -1 for s, t in position], np.int32
    )
    rows = NUM_SEQS + chunk
    qkv = rng.standard_normal((rows, config.kv_heads, group + 2, config.head_dim))
    qkv = jnp.asarray(qkv, jnp.float32)
    angles = rng.uniform(0, 6, (rows, config.head_dim // 2)).astype(np.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    pages = random_pages(config, rng)
    lengths = (jnp.asarray(decode_lens), jnp.asarray(chunk_kv), jnp.asarray(cu))
    out, fused = rotate_write_attend(
        qkv,
        np.int32(rows),
        cos,
        sin,
        slots,
        pages,
        tables,
        *lengths,
        None,
        options(config),
        kernels=kernels,
    )

    q = rotate_half(qkv[:, :, :-2].reshape(rows, -1, config.head_dim), cos, sin)
    k = rotate_half(qkv[:, :, -2], cos, sin)
    implementation = cpu_name(kernels)
    written = kv_write(k, qkv[:, :, -1], slots, pages, layout=layout, implementation=implementation)
    # XLA may round a rotation otherwise (fused multiply-add): by a bit of bfloat16 at most.
    new, old = (np.asarray(layout.as_cells(x.cells), np.float32) for x in (fused, written))
    assert np.abs(new - old).max() <= 2**-6
    assert (new != old).mean() < 1e-3
    calls = [
        (slice(NUM_SEQS), lengths[0], jnp.arange(NUM_SEQS + 1, dtype=jnp.int32)),
        (slice(NUM_SEQS, rows), *lengths[1:]),
    ]
    for part, kv_lens, cu_q_lens in calls:
        some = q[part].astype(jnp.bfloat16)
        want = attention(
            some, fused, tables, kv_lens, cu_q_lens, None, None, options(config), kernels=kernels
        )
        assert error(np.asarray(out[part]), np.asarray(want, np.float64)) < 2e-2
        assert np.asarray(want).any()
    unused = [1, 4, 5, *range(rows - 3, rows)]
    assert not np.asarray(out)[unused].any()

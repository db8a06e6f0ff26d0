"""What crosses from host to device: step shapes, packed batches, and the state of a slot."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.batch import DECODES, SAMPLES, Batch, BatchLayout, pack_batch
from jaxserve.carry import (
    ADJUSTS,
    CONSTRAINED,
    DRAWS,
    FILTERS,
    FLOATS,
    INTS,
    LOGPROBS,
    MASKS,
    Carry,
    CarrySizes,
    SlotPacker,
    set_slot,
)
from jaxserve.config import EngineConfig
from jaxserve.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams
from jaxserve.shapes import ShapeSet, StepShape, shape_set
from scheduler import BlockPool, Scheduler, SchedulerConfig, StepPlan
from scheduler import Sequence as Seq
from scheduler.plan import ScheduledTokens

# Shapes


@pytest.mark.parametrize(
    ("num_seqs", "chunk", "want"),
    [
        (1, 0, StepShape(8, 0)),
        (8, 0, StepShape(8, 0)),
        (9, 0, StepShape(16, 0)),
        (20, 0, StepShape(20, 0)),
        (1, 1, StepShape(20, 16)),
        (20, 16, StepShape(20, 16)),
        (3, 17, StepShape(20, 64)),
        (0, 0, StepShape(8, 0)),
    ],
)
def test_the_smallest_shape_that_holds_a_step(num_seqs: int, chunk: int, want: StepShape) -> None:
    shapes = ShapeSet(decode_rows=(8, 16, 20), chunks=(16, 64))
    assert shapes.choose(num_seqs, chunk) == want
    assert want in shapes.all()
    assert want.tokens == want.rows + want.chunk


@pytest.mark.parametrize(
    ("num_seqs", "chunk", "message"),
    [
        (21, 0, "a step of 21 sequences has no shape; the largest holds 20"),
        (21, 5, "a step of 21 sequences has no shape; the largest holds 20"),
        (1, 65, "a step of 65 chunk tokens has no shape; the largest holds 64"),
    ],
)
def test_a_step_that_no_shape_holds(num_seqs: int, chunk: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShapeSet(decode_rows=(8, 16, 20), chunks=(16, 64)).choose(num_seqs, chunk)


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(**{"max_num_seqs": 20, "max_num_batched_tokens": 100, **fields})


@pytest.mark.parametrize(
    ("fields", "platform", "decode", "chunks"),
    [
        ({}, "cpu", (8, 16, 20), (16, 50, 100)),
        ({}, "gpu", (1, 2, 4, 8, 16, 20), (16, 50, 100)),
        ({"max_num_seqs": 3}, "cpu", (8,), (16, 50, 100)),
        ({"max_num_seqs": 1}, "tpu", (1,), (16, 50, 100)),
        ({"max_num_batched_tokens": 512}, "cpu", (8, 16, 20), (64, 256, 512)),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 3}, "gpu", (1, 2), (1, 3)),
        ({"batch_buckets": (4, 32)}, "cpu", (4, 32), (16, 50, 100)),
        ({"prefill_buckets": (7, 80)}, "cpu", (8, 16, 20), (7, 80)),
        ({"deterministic": True}, "cpu", (20,), (100,)),
    ],
)
def test_shapes_of_a_configuration(
    fields: dict[str, Any], platform: str, decode: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    shapes = shape_set(config(**fields), platform)
    assert (shapes.decode_rows, shapes.chunks) == (decode, chunks)
    assert (shapes.max_rows, shapes.max_chunk) == (decode[-1], chunks[-1])
    assert len(set(shapes.all())) == len(decode) + len(chunks)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_buckets": (4, 8)}, r"batch_buckets=\(4, 8\) do not reach max_num_seqs=20"),
        (
            {"prefill_buckets": (16,), "enable_chunked_prefill": False},
            r"prefill_buckets=\(16,\) do not reach max_num_batched_tokens=100",
        ),
    ],
)
def test_buckets_that_are_too_small(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_set(config(**fields), "cpu")


def test_shapes_have_short_names() -> None:
    assert [str(s) for s in (StepShape(8, 0), StepShape(8, 64))] == ["decode8", "mixed8x64"]


# Batches

ROWS, CHUNK, NUM_SLOTS, PAGE_SIZE = 6, 20, 5, 4
LAYOUT = BatchLayout(StepShape(ROWS, CHUNK), NUM_SLOTS, PAGE_SIZE)


@functools.cache
def unpacker(layout: BatchLayout) -> Callable[[np.ndarray], Batch]:
    return jax.jit(layout.unpack)


def unpacked(plan: StepPlan, layout: BatchLayout = LAYOUT) -> Batch:
    packed = pack_batch(plan, layout)
    assert packed.shape == (layout.packed_size,)
    assert packed.dtype == np.int32
    return Batch(*map(np.asarray, unpacker(layout)(packed)))  # type: ignore[arg-type]


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Plans that a scheduler might make: pages as needed, the admitted with their whole tables."""
    entries, admitted, left, page = [], [], CHUNK, 1
    for slot in draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(0, NUM_SLOTS))]:
        is_decode = draw(st.booleans()) or left == 0
        start = draw(st.integers(0, 30))
        count = 1 if is_decode else draw(st.integers(1, left))
        left -= 0 if is_decode else count
        seq = Seq(str(slot), [100 * slot + position for position in range(60)], 4)
        first = -(-start // PAGE_SIZE)
        new = -(-(start + count) // PAGE_SIZE) - first
        pages = tuple(range(page, page + new))
        page += new
        entries.append(
            ScheduledTokens(seq, slot, start, count, draw(st.booleans()), is_decode, first, pages)
        )
        if not is_decode and draw(st.booleans()):
            admitted.append(seq)
    return StepPlan(tuple(entries), tuple(admitted), ())


@settings(max_examples=150, deadline=None)
@given(plan=plans())
def test_a_batch_says_what_its_plan_says(plan: StepPlan) -> None:
    batch = unpacked(plan)
    used = len(plan.entries)
    for i, entry in enumerate(plan.entries):
        assert (batch.slot[i], batch.start[i], batch.length[i]) == (
            entry.slot,
            entry.start,
            entry.count,
        )
        assert bool(batch.flags[i] & DECODES) == entry.is_decode
        assert bool(batch.flags[i] & SAMPLES) == entry.samples
        mine = np.flatnonzero(batch.row == i)
        if entry.is_decode:
            assert batch.last[i] == i
            assert len(mine) == 0
        else:
            assert batch.last[i] == ROWS + mine[-1]
            assert batch.token[mine].tolist() == entry.token_ids
            assert batch.position[mine].tolist() == list(range(entry.start, entry.end))
    assert (batch.slot[used:] == NUM_SLOTS).all(), "unused rows point past the slots"
    assert not batch.length[used:].any()
    assert not batch.flags[used:].any()
    # Chunk rows are in order of the entries, without gaps, then padding.
    assert (np.diff(batch.row) >= 0).all()
    assert (batch.row[plan.num_chunk_tokens :] == ROWS).all()
    got = {
        (int(slot), int(index), int(page))
        for slot, index, page in zip(batch.page_slot, batch.page_index, batch.page, strict=True)
        if slot < NUM_SLOTS
    }
    want = {
        (entry.slot, entry.first_new_page + j, page)
        for entry in plan.entries
        if entry.seq not in plan.admitted
        for j, page in enumerate(entry.new_pages)
    }
    assert got == want
    assert np.count_nonzero(batch.page_slot < NUM_SLOTS) == len(want)


def test_an_empty_plan_writes_nothing() -> None:
    batch = unpacked(StepPlan((), (), ()))
    assert (batch.slot == NUM_SLOTS).all()
    assert (batch.page_slot == NUM_SLOTS).all()
    assert (batch.row == ROWS).all()


def test_a_pure_decode_batch_has_no_chunk() -> None:
    layout = BatchLayout(StepShape(ROWS, 0), NUM_SLOTS, PAGE_SIZE)
    seq = Seq("a", [1, 2, 3], 4)
    batch = unpacked(
        StepPlan((ScheduledTokens(seq, 2, 8, 1, True, True, 2, (7,)),), (), ()), layout
    )
    assert batch.token.shape == batch.row.shape == (0,)
    assert (batch.page_slot[0], batch.page_index[0], batch.page[0]) == (2, 2, 7)
    assert batch.num_steps.tolist() == [1]


def test_a_batch_says_how_many_steps_it_has_and_each_row_of_them() -> None:
    layout = BatchLayout(StepShape(ROWS, 0), NUM_SLOTS, PAGE_SIZE, 8)
    entries = [
        ScheduledTokens(Seq(str(slot), [1], 9), slot, 8, count, True, True, 2, ())
        for slot, count in enumerate([5, 2, 5])
    ]
    batch = unpacked(StepPlan(tuple(entries), (), (), 5), layout)
    assert batch.num_steps.tolist() == [5]
    assert batch.length.tolist() == [5, 2, 5, 0, 0, 0]
    with pytest.raises(AssertionError):
        pack_batch(StepPlan(tuple(entries), (), (), 9), layout)


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    rows=st.integers(1, 9),
    chunk=st.integers(0, 40),
    page_size=st.integers(1, 9),
    steps=st.integers(1, 9),
)
def test_there_is_room_for_all_pages_that_a_step_can_add(
    data: st.DataObject, rows: int, chunk: int, page_size: int, steps: int
) -> None:
    """Every sequence starts where its tokens touch the most new pages."""
    steps = 1 if chunk else steps
    counts, left = [], chunk
    for _ in range(rows):
        counts.append(data.draw(st.integers(0, left)))
        left -= counts[-1]
    starts = data.draw(st.lists(st.integers(0, 20), min_size=rows, max_size=rows))
    pages = sum(
        -(-(start + (count or steps)) // page_size) - -(-start // page_size)
        for start, count in zip(starts, counts, strict=True)
    )
    assert pages <= BatchLayout(StepShape(rows, chunk), rows, page_size, steps).num_deltas


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 3, 4]),
    pages=st.integers(40, 90),
    steps=st.sampled_from([1, 2, 5]),
)
def test_batches_of_a_real_scheduler_keep_the_devices_tables_right(
    prompts: list[int], page_size: int, pages: int, steps: int
) -> None:
    """Whole tables at admission and the deltas of every step after it give the host's tables."""
    limits = SchedulerConfig(
        max_num_seqs=NUM_SLOTS,
        token_budget=CHUNK,
        max_prefill_tokens=CHUNK,
        max_model_len=40,
        multi_step=steps,
    )
    scheduler = Scheduler(limits, BlockPool(pages, page_size))
    layout = BatchLayout(StepShape(ROWS, CHUNK), NUM_SLOTS, page_size, steps)
    for i, length in enumerate(prompts):
        scheduler.add(Seq(str(i), [1 + j % 7 for j in range(length)], 10))
    tables = np.zeros((NUM_SLOTS, 40), np.int32)
    while scheduler.has_work:
        plan = scheduler.schedule()
        for seq in plan.admitted:
            tables[seq.slot] = 0
            tables[seq.slot, : len(seq.block_table)] = seq.block_table
        views = layout.views(pack_batch(plan, layout))
        for slot, index, page in zip(*views[-3:], strict=True):
            if slot < NUM_SLOTS:
                tables[slot, index] = page
        for entry in plan.entries:
            table = entry.seq.block_table
            assert tables[entry.slot, : len(table)].tolist() == table
            assert len(table) * page_size >= entry.end
        scheduler.update(plan, [[8] * entry.num_samples for entry in plan.entries])


# Slots

SIZES = CarrySizes(num_slots=3, vocab_size=70, pages_per_seq=4, max_model_len=12)
_set = jax.jit(functools.partial(set_slot, sizes=SIZES))


def full_carry() -> Carry:
    """A carry of arbitrary values, different in every slot."""
    rng = np.random.default_rng(0)

    def fill(like: jax.ShapeDtypeStruct) -> np.ndarray:
        return rng.integers(0, 2 if like.dtype == bool else 90, like.shape).astype(like.dtype)

    return jax.tree.map(fill, SIZES.abstract())


def pack(**changes: Any) -> np.ndarray:
    arguments: dict[str, Any] = {
        "slot": 1,
        "params": SamplingParams(),
        "seed": 0,
        "sample_index": 0,
        "end_ids": frozenset(),
        "token_ids": [3],
        "num_prompt": 1,
        "block_table": [],
    }
    packed = SlotPacker(SIZES).pack(**{**arguments, **changes})
    assert packed.shape == (SIZES.packed_size,)
    return packed


def slot_of(carry: Carry, slot: int) -> dict[str, np.ndarray]:
    return {name: np.asarray(part)[slot] for name, part in carry._asdict().items()}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_slot_is_set_to_what_was_packed(data: st.DataObject) -> None:
    ids = st.integers(0, SIZES.vocab_size - 1)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=SIZES.max_model_len))
    num_prompt = data.draw(st.integers(1, len(tokens)))
    table = data.draw(st.lists(st.integers(1, 99), max_size=SIZES.pages_per_seq))
    bias = data.draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=70))
    allowed = data.draw(st.none() | st.lists(ids, min_size=1, max_size=70))
    ends = data.draw(st.frozensets(ids, max_size=MAX_STOP_IDS))
    seed = data.draw(st.integers(-(2**63), 2**64 - 1))
    sample_index = data.draw(st.integers(0, 1023))
    params = SamplingParams(
        temperature=data.draw(st.floats(0, 2000, width=32)),
        top_p=0.5,
        min_p=0.25,
        top_k=data.draw(st.integers(-1, 100)),
        presence_penalty=-1.5,
        frequency_penalty=0.75,
        repetition_penalty=1.25,
        min_tokens=data.draw(st.integers(0, 5)),
        logit_bias=bias,
        allowed_token_ids=allowed,
        max_tokens=None,
    )
    slot = data.draw(st.integers(0, 2))
    before = full_carry()
    packed = pack(
        slot=slot,
        params=params,
        seed=seed,
        sample_index=sample_index,
        end_ids=ends,
        token_ids=tokens,
        num_prompt=num_prompt,
        block_table=table,
    )
    after = _set(before, packed)
    for other in {0, 1, 2} - {slot}:
        for name, part in slot_of(before, other).items():
            assert np.array_equal(slot_of(after, other)[name], part)

    got, vocab = slot_of(after, slot), SIZES.vocab_size
    assert got["last_token"] == np.asarray(before.last_token)[slot], "the device knows it better"
    assert got["block_table"].tolist() == table + [0] * (SIZES.pages_per_seq - len(table))
    counts = np.bincount(tokens[num_prompt:], minlength=vocab)
    assert np.array_equal(got["output_counts"], counts)
    assert np.flatnonzero(got["in_prompt"]).tolist() == sorted(set(tokens[:num_prompt]))
    floats = dict(zip(FLOATS, got["floats"].tolist(), strict=True))
    assert floats == {
        "temperature": params.temperature,
        "top_p": 0.5,
        "min_p": 0.25,
        "presence": -1.5,
        "frequency": 0.75,
        "repetition": 1.25,
    }
    ints = dict(zip(INTS, got["ints"].tolist(), strict=True))
    low, high = ints["seed_low"] % 2**32, ints["seed_high"] % 2**32
    assert low + (high << 32) == seed % 2**64
    assert ints["sample_index"] == sample_index
    assert ints["top_k"] == (min(params.top_k, vocab) if params.top_k > 0 else vocab)
    assert ints["min_position"] == num_prompt + params.min_tokens
    used = got["bias_ids"] < vocab
    pairs = zip(got["bias_ids"][used].tolist(), got["bias_values"][used].tolist(), strict=True)
    assert dict(pairs) == bias
    assert used.shape == (MAX_LOGIT_BIAS,)
    assert got["end_ids"][got["end_ids"] < vocab].tolist() == sorted(ends)
    assert not got["ended"]
    bits = np.unpackbits(got["allowed"].view(np.uint8), bitorder="little")[:vocab]
    assert np.flatnonzero(bits).tolist() == sorted(
        set(range(vocab) if allowed is None else allowed)
    )


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({"temperature": 0}, 0),
        ({"temperature": 0, "logprobs": 0}, LOGPROBS),
        ({}, DRAWS),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, DRAWS),
        ({"top_k": 5}, DRAWS | FILTERS),
        ({"top_p": 0.9}, DRAWS | FILTERS),
        ({"min_p": 0.1}, DRAWS | FILTERS),
        ({"top_k": 1}, 0),
        ({"top_p": 0}, 0),
        ({"temperature": 0, "top_k": 5}, 0),
        ({"presence_penalty": -0.1}, DRAWS | ADJUSTS),
        ({"frequency_penalty": 0.1}, DRAWS | ADJUSTS),
        ({"repetition_penalty": 0.9}, DRAWS | ADJUSTS),
        ({"logit_bias": {5: 1.0}}, DRAWS | ADJUSTS),
        ({"logit_bias": {}}, DRAWS),
        ({"allowed_token_ids": [5]}, DRAWS | MASKS),
        ({"structured_outputs": {"regex": "a"}}, DRAWS | MASKS | CONSTRAINED),
        ({"min_tokens": 1}, DRAWS | ADJUSTS),
    ],
)
def test_flags_say_what_a_row_needs(fields: dict[str, Any], flags: int) -> None:
    got = slot_of(_set(full_carry(), pack(params=SamplingParams(**fields))), 1)
    assert got["ints"][INTS.index("flags")] == flags


def test_the_parts_of_the_packed_vector_do_not_overlap() -> None:
    sections = sorted(SIZES.sections().values())
    ends = [offset + length for offset, length in sections]
    assert [offset for offset, _ in sections] == [0, *ends[:-1]]
    assert SIZES.packed_size == ends[-1]


def test_a_full_slot_fits() -> None:
    tokens = [i % SIZES.vocab_size for i in range(SIZES.max_model_len)]
    packed = pack(
        token_ids=tokens,
        num_prompt=4,
        block_table=[9] * SIZES.pages_per_seq,
        end_ids=frozenset(range(MAX_STOP_IDS)),
        params=SamplingParams(min_tokens=1),
    )
    got = slot_of(_set(jax.tree.map(jnp.asarray, full_carry()), packed), 1)
    assert np.array_equal(got["end_ids"], np.arange(MAX_STOP_IDS))
    assert (got["block_table"] == 9).all()
    assert got["output_counts"].sum() == SIZES.max_model_len - 4

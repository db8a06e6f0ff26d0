"""The compiled step: device iterations over a fixed-shape batch, as pure functions.

`step(params, cache, carry, packed) -> (cache, carry, out, chunk_hidden)`.  It is built from two
halves that also exist as functions of their own: `build_forward`, tokens to hidden rows, and
`build_sample`, hidden rows to tokens.  A step samples under the masks of constraints: it asks the
host for them while it runs (`asked_masks`), or the host starts the second half with them, once it
has learnt what the step before has sampled.  A pure decode step may be repeated within one call:
`decode_steps`.  Nothing here knows which executable it will become; the runner compiles it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxserve.batch import DECODES, SAMPLES, Batch
from jaxserve.carry import CONSTRAINED, INTS, Carry
from jaxserve.models.llama import Llama, Params, bind
from jaxserve.paged import PagedAttention
from jaxserve.report import pack_report
from jaxserve.sampler import Sampled, sample
from jaxserve.sampling.logprobs import token_logprobs
from jaxserve.shapes import StepShape
from jaxserve.spec import Cache, StepSpec
from pallas_kernels.cpu.ask import ask

State = tuple[jax.Array, Cache, Carry, jax.Array]
"""Of the loop of `decode_steps`: index, cache, carry and reports."""

MULTI_STEP = {"cpu": 4}
"""Most decode steps of one dispatch by platform, 1 where it is not named."""
PROMPT_BLOCK = 32
"""Chunk rows whose logits exist at once when prompt log-probabilities are computed."""

Step = Callable[[Params, Cache, Carry, jax.Array], tuple[Cache, Carry, jax.Array, jax.Array]]
"""`(params, cache, carry, packed) -> (cache, carry, out, chunk_hidden)`."""


def build_step(spec: StepSpec, shape: StepShape, mesh: Mesh) -> Step:
    """The step function of one shape."""
    layout = spec.batch_layout(shape)

    def step(
        params: Params, cache: Cache, carry: Carry, packed: jax.Array
    ) -> tuple[Cache, Carry, jax.Array, jax.Array]:
        batch = layout.unpack(packed)
        model = bind(spec.model, params)
        carry = _with_pages(carry, batch)
        once = partial(_once, spec, shape, mesh, model)
        if layout.max_steps > 1:
            cache, carry, out = decode_steps(spec, once, layout.max_steps, cache, carry, batch)
            return cache, carry, out, jnp.zeros((0, spec.model.hidden_size), jnp.float32)
        cache, carry, report, hidden = once(cache, carry, at_step(spec, carry, batch, 0))
        return cache, carry, report[None], hidden[shape.rows :]

    return step


Forward = Callable[[Params, Cache, Carry, jax.Array], tuple[Cache, Carry, jax.Array, jax.Array]]
"""`(params, cache, carry, packed) -> (cache, carry, hidden, chunk_hidden)`, with `hidden` the row
of each sequence's last token."""


def build_forward(spec: StepSpec, shape: StepShape, mesh: Mesh) -> Forward:
    """The first half of one step of a shape: everything but its tokens."""
    layout = spec.batch_layout(shape)

    def half(
        params: Params, cache: Cache, carry: Carry, packed: jax.Array
    ) -> tuple[Cache, Carry, jax.Array, jax.Array]:
        batch = layout.unpack(packed)
        carry = _with_pages(carry, batch)
        batch = at_step(spec, carry, batch, 0)
        cache, hidden = forward(spec, shape, mesh, bind(spec.model, params), cache, carry, batch)
        return cache, carry, hidden[batch.last], hidden[shape.rows :]

    return half


SampleFn = Callable[[Params, Carry, jax.Array, jax.Array, jax.Array], tuple[Carry, jax.Array]]
"""`(params, carry, hidden, packed, masks) -> (carry, out)`."""


def build_sample(spec: StepSpec, rows: int) -> SampleFn:
    """The second half of a step: the next token of each of `rows` sequence rows.

    It takes the `hidden` that the first half gave, of a packed batch only the numbers of its
    rows, and masks as i32[slots, allowed_words].
    """
    layout = spec.batch_layout(StepShape(rows, 0))

    def half(
        params: Params, carry: Carry, hidden: jax.Array, packed: jax.Array, masks: jax.Array
    ) -> tuple[Carry, jax.Array]:
        rest = layout.packed_size - layout.num_row_numbers
        batch = at_step(spec, carry, layout.unpack(jnp.pad(packed, (0, rest))), 0)
        model, slot = bind(spec.model, params), _slots(spec, batch)
        carry, report = sample_rows(spec, model, carry, batch, hidden, masks[slot])
        return carry, report[None]

    return half


def _with_pages(carry: Carry, batch: Batch) -> Carry:
    """The carry with the batch's new pages in its block tables."""
    tables = carry.block_table.at[batch.page_slot, batch.page_index].set(batch.page, mode="drop")
    return carry._replace(block_table=tables)


Once = Callable[[Cache, Carry, Batch], tuple[Cache, Carry, jax.Array, jax.Array]]
"""`(cache, carry, batch) -> (cache, carry, report, hidden)`, one iteration."""


def _once(
    spec: StepSpec,
    shape: StepShape,
    mesh: Mesh,
    model: Llama,
    cache: Cache,
    carry: Carry,
    batch: Batch,
) -> tuple[Cache, Carry, jax.Array, jax.Array]:
    cache, hidden = forward(spec, shape, mesh, model, cache, carry, batch)
    carry, report = sample_rows(spec, model, carry, batch, hidden[batch.last])
    return cache, carry, report, hidden


def decode_steps(
    spec: StepSpec, once: Once, max_steps: int, cache: Cache, carry: Carry, batch: Batch
) -> tuple[Cache, Carry, jax.Array]:
    """Repeat a decode step `batch.num_steps` times, or until every row has ended.

    The trip count is data, so that one executable serves every number of steps, one included.

    Returns:
        Cache, carry, and the reports as i32[max_steps, rows, out_width], zero for steps not run.
    """
    unused = ~jnp.any(batch.length > 0)  # a batch that only warms the executable up

    def goes_on(state: State) -> jax.Array:
        index, _, carry, _ = state
        live = jnp.any(at_step(spec, carry, batch, index).length > 0)
        return (index < batch.num_steps[0]) & (live | unused)

    def iterate(state: State) -> State:
        index, cache, carry, out = state
        cache, carry, report, _ = once(cache, carry, at_step(spec, carry, batch, index))
        return index + 1, cache, carry, lax.dynamic_update_index_in_dim(out, report, index, 0)

    out = jnp.zeros((max_steps, batch.slot.shape[0], spec.out_width), jnp.int32)
    _, cache, carry, out = lax.while_loop(goes_on, iterate, (jnp.int32(0), cache, carry, out))
    return cache, carry, out


def at_step(spec: StepSpec, carry: Carry, batch: Batch, index: jax.Array | int) -> Batch:
    """The batch of one step of a dispatch.

    A decode row computes one token a step, at the next position each time, until it has had its
    number of them or its sequence has ended; from then on the row is unused.
    """
    decodes = batch.flags & DECODES != 0
    goes_on = (batch.length > index) & ~carry.ended[_slots(spec, batch)]
    return batch._replace(
        start=batch.start + jnp.where(decodes, index, 0),
        length=jnp.where(decodes, goes_on.astype(jnp.int32), batch.length),
    )


def _slots(spec: StepSpec, batch: Batch) -> jax.Array:
    """Slot of each row, any slot where the row is unused."""
    return jnp.minimum(batch.slot, spec.sizes.num_slots - 1)


def forward(
    spec: StepSpec,
    shape: StepShape,
    mesh: Mesh,
    model: Llama,
    cache: Cache,
    carry: Carry,
    batch: Batch,
) -> tuple[Cache, jax.Array]:
    """Compute every token of the batch: its KV into the pages, its hidden row as f32[tokens, H]."""
    slot = _slots(spec, batch)
    decodes = (batch.flags & DECODES != 0) & (batch.length > 0)
    tokens = jnp.concatenate([jnp.where(decodes, carry.last_token[slot], 0), batch.token])
    positions = jnp.concatenate([batch.start, batch.position])
    attend = PagedAttention(spec, shape, mesh, cache, carry.block_table[slot], batch)
    hidden = model(tokens, positions, attend, _used_tokens(batch))
    return tuple(attend.cache), hidden


def _used_rows(batch: Batch) -> jax.Array:
    """Sequence rows up to the last that computes something, i32[]."""
    return _up_to_last(batch.length > 0)


def _used_tokens(batch: Batch) -> jax.Array:
    """Model rows up to the last that computes something, i32[]."""
    rows, chunk = batch.slot.shape[0], _up_to_last(batch.row < batch.slot.shape[0])
    return jnp.where(chunk > 0, rows + chunk, _used_rows(batch))


def _up_to_last(used: jax.Array) -> jax.Array:
    place = jnp.arange(1, used.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(used, place, 0), initial=0)


def sample_rows(
    spec: StepSpec,
    model: Llama,
    carry: Carry,
    batch: Batch,
    hidden: jax.Array,
    masks: jax.Array | None = None,
) -> tuple[Carry, jax.Array]:
    """Sample the next token of each sequence row that asks for it; record it in the carry.

    A row that samples one of its end tokens, whose logits are not finite, or whose constraint
    allows nothing more, ends its slot: the host, which may have dispatched the next step already,
    will find the same.

    Args:
        spec: the engine's static sizes.
        model: with its weights.
        carry: of the step.
        batch: of the step.
        hidden: f32[rows, H].
        masks: i32[rows, words], what constraints allow; absent where the step asks for them, or
            there are none.

    Returns:
        The carry, and the report as i32[rows, out_width]; see `unpack_report`.
    """
    live = batch.length > 0
    samples = (batch.flags & SAMPLES != 0) & live
    slot, used = _slots(spec, batch), _used_rows(batch)
    is_complete = jnp.zeros_like(samples)
    if masks is None and spec.asks is not None:
        masks, is_complete = asked_masks(spec.asks, spec, carry, batch, hidden, samples)
        samples &= ~is_complete
    sampled = sample(
        partial(model.logits, hidden, used),
        partial(model.greedy, hidden, used),
        carry,
        slot,
        batch.start + batch.length,
        samples,
        spec.num_top,
        masks,
    )
    samples &= sampled.finite
    # No token that `min_tokens` holds back is sampled, so that any of them ends the row.
    stops = jnp.any(sampled.token[:, None] == carry.end_ids[slot], -1)
    ends = (samples & stops) | (live & ~sampled.finite) | is_complete

    def where(rows: jax.Array) -> jax.Array:
        return jnp.where(rows, batch.slot, spec.sizes.num_slots)  # dropped where false

    into = where(samples)
    carry = carry._replace(
        last_token=carry.last_token.at[into].set(sampled.token, mode="drop"),
        output_counts=carry.output_counts.at[into, sampled.token].add(1, mode="drop"),
        ended=carry.ended.at[where(ends)].set(True, mode="drop"),
    )
    return carry, pack_report(sampled, live=live, samples=samples)


def asked_masks(
    kernels: str,
    spec: StepSpec,
    carry: Carry,
    batch: Batch,
    hidden: jax.Array,  # f32[rows, H], after which to ask: nothing is computed meanwhile
    samples: jax.Array,  # bool[rows]
) -> tuple[jax.Array, jax.Array]:  # i32[rows, words], bool[rows]
    """What the constraints of rows allow next, and the rows whose text is complete.

    The host is asked, and waited for, if there is a constrained row.
    """
    slot = _slots(spec, batch)
    asks = samples & (carry.ints[slot, INTS.index("flags")] & CONSTRAINED != 0)
    words = spec.sizes.allowed_words

    def answers() -> tuple[jax.Array, jax.Array]:
        token = carry.last_token[slot]
        masks, stops = ask(kernels, batch.whom, asks.astype(jnp.int32), token, hidden, words)
        return masks, stops != 0

    def none() -> tuple[jax.Array, jax.Array]:
        return jnp.full((slot.shape[0], words), -1, jnp.int32), jnp.zeros_like(samples)

    masks, is_complete = lax.cond(jnp.any(asks), answers, none)
    return masks, is_complete


def prompt_logprobs(
    spec: StepSpec, params: Params, hidden: jax.Array, targets: jax.Array
) -> jax.Array:
    """Log-probabilities of the tokens that follow each chunk row.

    Args:
        spec: the engine's static sizes.
        params: canonical weights.
        hidden: f32[chunk, H], a step's chunk rows.
        targets: i32[chunk], the token after each row; any valid id where there is none.

    Returns:
        i32[chunk, out_width], in the layout of a step's report with `targets` as the tokens.
    """
    model = bind(spec.model, params)
    chunk = targets.shape[0]
    block = min(PROMPT_BLOCK, chunk)
    padding = -chunk % block
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
    blocks = jnp.pad(targets, (0, padding)).reshape(-1, block)

    def rows(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = model.logits(args[0])
        logprob, rank, ids, top = token_logprobs(logits, args[1], spec.num_top)
        finite = jnp.isfinite(logits.max(-1))
        every = jnp.ones_like(finite)
        sampled = Sampled(args[1], finite, logprob, rank, ids, top)
        return pack_report(sampled, live=every, samples=every)

    report: jax.Array = lax.map(rows, (hidden, blocks))
    return report.reshape(-1, spec.out_width)[:chunk]

"""The compiled step: one device iteration over a fixed-shape batch, as pure functions.

`step(params, cache, carry, packed) -> (cache, carry, out, chunk_hidden)`.  It is built from two
halves that also stand alone: `forward`, tokens to hidden rows, and `sample_rows`, hidden rows to
tokens.  Nothing here knows which executable it will become; the runner compiles it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxserve.batch import DECODES, SAMPLES, Batch
from jaxserve.carry import Carry
from jaxserve.models.llama import Llama, Params, bind
from jaxserve.paged import PagedAttention
from jaxserve.report import pack_report
from jaxserve.sampler import Sampled, sample, token_logprobs
from jaxserve.shapes import StepShape
from jaxserve.spec import Cache, StepSpec

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
        carry = carry._replace(
            block_table=carry.block_table.at[batch.page_slot, batch.page_index].set(
                batch.page, mode="drop"
            )
        )
        cache, hidden = forward(spec, shape, mesh, model, cache, carry, batch)
        carry, out = sample_rows(spec, model, carry, batch, hidden[batch.last])
        return cache, carry, out, hidden[shape.rows :]

    return step


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
    slot = jnp.minimum(batch.slot, spec.sizes.num_slots - 1)
    decodes = (batch.flags & DECODES != 0) & (batch.length > 0)
    tokens = jnp.concatenate([jnp.where(decodes, carry.last_token[slot], 0), batch.token])
    positions = jnp.concatenate([batch.start, batch.position])
    attend = PagedAttention(spec, shape, mesh, cache, carry.block_table[slot], batch)
    hidden = model(tokens, positions, attend)
    return tuple(attend.cache), hidden


def sample_rows(
    spec: StepSpec, model: Llama, carry: Carry, batch: Batch, hidden: jax.Array
) -> tuple[Carry, jax.Array]:
    """Sample the next token of each sequence row that asks for it; record it in the carry.

    Returns:
        The carry, and the report as i32[rows, out_width]; see `unpack_report`.
    """
    samples = (batch.flags & SAMPLES != 0) & (batch.length > 0)
    slot = jnp.minimum(batch.slot, spec.sizes.num_slots - 1)
    sampled = sample(
        model.logits(hidden), carry, slot, batch.start + batch.length, samples, spec.num_top
    )
    into = jnp.where(samples, batch.slot, spec.sizes.num_slots)  # dropped where none
    carry = carry._replace(
        last_token=carry.last_token.at[into].set(sampled.token, mode="drop"),
        output_counts=carry.output_counts.at[into, sampled.token].add(1, mode="drop"),
    )
    return carry, pack_report(sampled)


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
        return pack_report(Sampled(args[1], finite, logprob, rank, ids, top))

    report: jax.Array = lax.map(rows, (hidden, blocks))
    return report.reshape(-1, spec.out_width)[:chunk]

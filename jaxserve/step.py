"""The compiled step: one device iteration over a fixed-shape batch, as pure functions.

`step(params, cache, carry, packed) -> (cache, carry, out, chunk_hidden)`.  It is built from two
halves that also stand alone: `forward`, tokens to hidden rows, and `sample_rows`, hidden rows to
tokens.  Nothing here knows which executable it will become; the runner compiles it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxserve.batch import DECODES, SAMPLES, Batch, BatchLayout
from jaxserve.carry import LOGPROBS, Carry, CarrySizes
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Llama, Params, bind
from jaxserve.sampler import Sampled, sample, token_logprobs
from jaxserve.shapes import StepShape
from pallas_kernels import (
    KVLayout,
    Plan,
    items_bound,
    kv_write,
    make_plan,
    ragged_paged_attention,
)

TENSOR_AXIS = "tensor"
"""Mesh axis over which the KV heads of each layer are split."""
PROMPT_BLOCK = 32
"""Chunk rows whose logits exist at once when prompt log-probabilities are computed."""

Cache = tuple[jax.Array, ...]
Step = Callable[[Params, Cache, Carry, jax.Array], tuple[Cache, Carry, jax.Array, jax.Array]]


@dataclass(frozen=True)
class StepSpec:
    """Everything static about an engine's steps."""

    model: ModelConfig
    layout: KVLayout
    sizes: CarrySizes
    num_top: int
    """Entries of every report of top log-probabilities."""
    block_q: int
    """Query tokens of a work item of the chunk form of attention."""
    block_kv: int
    """Keys that the chunk form visits at once."""
    attention: str
    """Attention implementation, a name of `pallas_kernels.implementations`."""

    def batch_layout(self, shape: StepShape) -> BatchLayout:
        """Layout of the packed batch of a shape."""
        return BatchLayout(shape, self.sizes.num_slots, self.layout.page_size)

    @property
    def out_width(self) -> int:
        """Columns of a step's packed report."""
        return 4 + 2 * self.num_top


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


class PagedAttention:
    """`Attend` over the paged cache: writes the rows' keys and values, then reads all of theirs.

    Lives for one trace; `cache` holds the layers' arrays as they are after the last call.
    """

    def __init__(
        self,
        spec: StepSpec,
        shape: StepShape,
        mesh: Mesh,
        cache: Cache,
        block_tables: jax.Array,  # i32[rows, pages_per_seq]
        batch: Batch,
    ) -> None:
        """Lay out the step's attention work, once for all layers."""
        self.cache = list(cache)
        self._spec, self._shape, self._mesh = spec, shape, mesh
        self._tables = block_tables
        decodes = batch.flags & DECODES != 0
        live = batch.length > 0
        self._decode_lens = jnp.where(live & decodes, batch.start + 1, 0)
        chunk_lens = jnp.where(live & ~decodes, batch.length, 0)
        self._chunk_kv_lens = jnp.where(chunk_lens > 0, batch.start + batch.length, 0)
        self._chunk_cu = jnp.concatenate(
            [jnp.zeros(1, jnp.int32), jnp.cumsum(chunk_lens, dtype=jnp.int32)]
        )
        self._plans = {
            window: self._plan(window, chunk_lens) for window in set(spec.model.sliding_windows)
        }
        self._slots = self._cells(batch, decodes & live)

    def _plan(self, window: int | None, chunk_lens: jax.Array) -> Plan | None:
        if not self._shape.chunk:
            return None
        return make_plan(
            self._chunk_kv_lens,
            chunk_lens,
            num_items=items_bound(self._shape.chunk, self._shape.rows, self._spec.block_q),
            block_q=self._spec.block_q,
            window=window,
        )

    def _cells(self, batch: Batch, decodes: jax.Array) -> jax.Array:
        """Cache cell of each model row, -1 for rows that write nothing."""
        rows, page_size = self._shape.rows, self._spec.layout.page_size
        row = jnp.concatenate([jnp.arange(rows, dtype=jnp.int32), batch.row])
        position = jnp.concatenate([batch.start, batch.position])
        writes = jnp.concatenate([decodes, batch.row < rows])
        page = self._tables[jnp.minimum(row, rows - 1), position // page_size]
        return jnp.where(writes, page * page_size + position % page_size, -1)

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Write, then attend, on every shard of the KV heads by itself."""
        heads = PartitionSpec(None, TENSOR_AXIS, None)
        pages = self._spec.layout.partition_spec(TENSOR_AXIS)
        window = self._spec.model.sliding_windows[layer]
        shared = (
            self._slots,
            self._tables,
            self._decode_lens,
            self._chunk_kv_lens,
            self._chunk_cu,
            self._plans[window],
        )
        run = jax.shard_map(
            partial(self._local, window),
            mesh=self._mesh,
            in_specs=(heads, heads, heads, pages, PartitionSpec()),
            out_specs=(heads, pages),
            check_vma=False,
        )
        out, self.cache[layer] = run(q, k, v, self.cache[layer], shared)
        return out

    def _local(
        self,
        window: int | None,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        shared: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, Plan | None],
    ) -> tuple[jax.Array, jax.Array]:
        slots, tables, decode_lens, chunk_kv_lens, chunk_cu, plan = shared
        spec, rows = self._spec, self._shape.rows
        cache = kv_write(k, v, slots, cache, layout=spec.layout, implementation=spec.attention)
        attend = partial(
            ragged_paged_attention,
            layout=spec.layout,
            sm_scale=spec.model.head_dim**-0.5,
            block_kv=spec.block_kv,
            window=window,
            implementation=spec.attention,
        )
        each = jnp.arange(rows + 1, dtype=jnp.int32)
        out = attend(q[:rows], cache, tables, decode_lens, each, None, split=True, block_q=1)
        if self._shape.chunk:
            chunk = attend(
                q[rows:],
                cache,
                tables,
                chunk_kv_lens,
                chunk_cu,
                plan,
                split=False,
                block_q=spec.block_q,
            )
            out = jnp.concatenate([out, chunk])
        return out, cache


def sample_rows(
    spec: StepSpec, model: Llama, carry: Carry, batch: Batch, hidden: jax.Array
) -> tuple[Carry, jax.Array]:
    """Sample the next token of each sequence row that asks for it; record it in the carry.

    Returns:
        The carry, and the report as i32[rows, out_width]; see `unpack_out`.
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
    return carry, _pack_out(sampled)


def _pack_out(sampled: Sampled) -> jax.Array:
    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    columns = [
        sampled.token[:, None],
        sampled.finite.astype(jnp.int32)[:, None],
        bits(sampled.logprob)[:, None],
        sampled.rank[:, None],
        sampled.top_ids,
        bits(sampled.top_logprobs),
    ]
    return jnp.concatenate(columns, axis=1)


@dataclass(frozen=True)
class StepOutput:
    """A step's report on the host; row `i` belongs to entry `i` of the plan."""

    token: npt.NDArray[np.int32]
    finite: npt.NDArray[np.bool_]
    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]  # [rows, num_top]
    top_logprobs: npt.NDArray[np.float32]  # [rows, num_top]


def unpack_out(out: npt.NDArray[np.int32], num_top: int) -> StepOutput:
    """Views of a packed report."""
    return StepOutput(
        token=out[:, 0],
        finite=out[:, 1] != 0,
        logprob=out[:, 2].view(np.float32),
        rank=out[:, 3],
        top_ids=out[:, 4 : 4 + num_top],
        top_logprobs=np.ascontiguousarray(out[:, 4 + num_top :]).view(np.float32),
    )


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
        return _pack_out(Sampled(args[1], finite, logprob, rank, ids, top))

    report: jax.Array = lax.map(rows, (hidden, blocks))
    return report.reshape(-1, spec.out_width)[:chunk]


__all__ = [
    "LOGPROBS",
    "TENSOR_AXIS",
    "PagedAttention",
    "Step",
    "StepOutput",
    "StepSpec",
    "build_step",
    "forward",
    "prompt_logprobs",
    "sample_rows",
    "unpack_out",
]

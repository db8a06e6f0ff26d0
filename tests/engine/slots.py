"""A carry with the slots of given sampling parameters, and the sampler compiled over it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.carry import Carry, CarrySizes, SlotPacker, set_slot
from jaxserve.sampler import Sampled, sample
from jaxserve.sampling.adjust import adjust
from jaxserve.sampling.largest import argmax, only_allowed
from jaxserve.sampling_params import SamplingParams

VOCAB = 200
"""Neither a multiple of the sampler's block nor of the bits of a word."""
NUM_SLOTS = 8
NUM_TOP = 5
SIZES = CarrySizes(num_slots=NUM_SLOTS, vocab_size=VOCAB, pages_per_seq=3, max_model_len=24)


@dataclass(frozen=True)
class Slot:
    """What a sequence's slot is set to; a prompt of 4 tokens by default."""

    params: SamplingParams
    seed: int = 0
    sample_index: int = 0
    prompt: Sequence[int] = (1, 2, 3, 4)
    output: Sequence[int] = ()
    end_ids: frozenset[int] = frozenset()

    @property
    def position(self) -> int:
        """Of the next token."""
        return len(self.prompt) + len(self.output)


_set = jax.jit(functools.partial(set_slot, sizes=SIZES))


@jax.jit
def _adjust(logits: jax.Array, carry: Carry, rows: jax.Array, positions: jax.Array) -> jax.Array:
    return only_allowed(adjust(logits, carry, rows, positions), carry.allowed[rows])


@jax.jit
def _sample(logits: jax.Array, *rest: jax.Array) -> Sampled:
    return sample(
        lambda: logits,
        lambda allowed: (argmax(only_allowed(logits, allowed)), logits.max(-1)),
        *rest,
        num_top=NUM_TOP,
    )


def zeros() -> Carry:
    """A carry whose slots nobody has set."""
    return jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), SIZES.abstract())


def carry_of(slots: Sequence[Slot]) -> Carry:
    """A carry with these in its first slots."""
    carry = zeros()
    for i, slot in enumerate(slots):
        packed = SlotPacker(SIZES).pack(
            slot=i,
            params=slot.params,
            seed=slot.seed,
            sample_index=slot.sample_index,
            end_ids=slot.end_ids,
            token_ids=[*slot.prompt, *slot.output],
            num_prompt=len(slot.prompt),
            block_table=[1],
        )
        carry = _set(carry, packed)
    return carry


def run_adjust(logits: np.ndarray, slots: Sequence[Slot]) -> np.ndarray:
    """`adjust`, then `only_allowed`, with row `i` in slot `i`."""
    positions = np.array([slot.position for slot in slots], np.int32)
    rows = np.arange(len(slots), dtype=np.int32)
    return np.asarray(_adjust(logits, carry_of(slots), rows, positions))


def run_sample(
    logits: np.ndarray,  # [rows, VOCAB]
    carry: Carry,
    positions: Sequence[int] | np.ndarray,
    rows: Sequence[int] | None = None,
    active: Sequence[bool] | None = None,
) -> Sampled:
    """`sample` on the host; row `i` in slot `rows[i]`, by default `i`."""
    result = _sample(
        logits.astype(np.float32),
        carry,
        np.arange(len(logits), dtype=np.int32) if rows is None else np.array(rows, np.int32),
        np.array(positions, np.int32),
        np.ones(len(logits), bool) if active is None else np.array(active),
    )
    return Sampled(*(np.asarray(part) for part in result))  # type: ignore[arg-type]


def draw(
    logits: np.ndarray,  # [VOCAB]
    asked: Sequence[Slot],
    num_positions: int,
    first: int = 0,
) -> np.ndarray:  # i32[len(asked), num_positions]
    """Tokens that each slot draws at consecutive positions, all from the same logits."""
    carry = carry_of(asked)
    rows = np.broadcast_to(logits, (NUM_SLOTS, VOCAB)).astype(np.float32)
    tokens = [run_sample(rows, carry, [first + i] * NUM_SLOTS).token for i in range(num_positions)]
    return np.stack(tokens, 1)[: len(asked)]

"""Device state of the slots: what a running sequence keeps on the device between steps.

`Carry` holds one row per slot; it is donated through every step.  `pack_slot` writes the state
of one slot as a single int32 vector on the host, `set_slot` unpacks it on the device.  A slot is
set at admission and again after preemption, then with the output so far, so that penalties
survive preemption and nothing large travels in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INTS = ("seed_low", "seed_high", "sample_index", "top_k", "min_position", "flags")

ADJUSTS = 1
"""Flag: logits are adjusted (penalties, bias, held-back end tokens)."""
DRAWS = 2
"""Flag: tokens are drawn, not taken greedily."""
FILTERS = 4
"""Flag: the draw is limited by top-k, top-p or min-p."""
LOGPROBS = 8
"""Flag: log-probabilities are reported."""
MASKS = 16
"""Flag: only some ids are allowed."""
CONSTRAINED = 32
"""Flag: which ids are allowed depends on the tokens before."""


class Carry(NamedTuple):
    """State of every slot."""

    last_token: jax.Array  # i32[slots], sampled by the last step that sampled
    block_table: jax.Array  # i32[slots, pages_per_seq]
    output_counts: jax.Array  # i32[slots, vocab]
    in_prompt: jax.Array  # bool[slots, vocab]
    floats: jax.Array  # f32[slots, len(FLOATS)]
    ints: jax.Array  # i32[slots, len(INTS)]
    bias_ids: jax.Array  # i32[slots, MAX_LOGIT_BIAS], vocab where unused
    bias_values: jax.Array  # f32[slots, MAX_LOGIT_BIAS]
    end_ids: jax.Array  # i32[slots, MAX_STOP_IDS], vocab where unused
    ended: jax.Array  # bool[slots], by a token of end_ids, by its constraint, or by broken logits
    allowed: jax.Array  # i32[slots, ceil(vocab / 32)], packed bits of what a request allows


@dataclass(frozen=True)
class CarrySizes:
    """Sizes of the carry's axes, and of the packed vector that sets a slot."""

    num_slots: int
    vocab_size: int
    pages_per_seq: int
    max_model_len: int

    @property
    def allowed_words(self) -> int:
        """32-bit words of one slot's mask of allowed ids."""
        return -(-self.vocab_size // 32)

    def abstract(self) -> Carry:
        """Shapes and types of the carry."""
        slots, vocab = self.num_slots, self.vocab_size

        def of(dtype: npt.DTypeLike, *shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

        i32, f32 = partial(of, np.int32), partial(of, np.float32)

        return Carry(
            last_token=i32(slots),
            block_table=i32(slots, self.pages_per_seq),
            output_counts=i32(slots, vocab),
            in_prompt=of(np.bool_, slots, vocab),
            floats=f32(slots, len(FLOATS)),
            ints=i32(slots, len(INTS)),
            bias_ids=i32(slots, MAX_LOGIT_BIAS),
            bias_values=f32(slots, MAX_LOGIT_BIAS),
            end_ids=i32(slots, MAX_STOP_IDS),
            ended=of(np.bool_, slots),
            allowed=i32(slots, self.allowed_words),
        )

    def sections(self) -> dict[str, tuple[int, int]]:
        """Offset and length of each part of the packed vector."""
        lengths = {
            "slot": 1,
            "floats": len(FLOATS),
            "ints": len(INTS),
            "num_prompt": 1,
            "num_tokens": 1,
            "tokens": self.max_model_len,
            "block_table": self.pages_per_seq,
            "bias_ids": MAX_LOGIT_BIAS,
            "bias_values": MAX_LOGIT_BIAS,
            "end_ids": MAX_STOP_IDS,
            "allowed": self.allowed_words,
        }
        sections, offset = {}, 0
        for name, length in lengths.items():
            sections[name] = (offset, length)
            offset += length
        return sections

    @property
    def packed_size(self) -> int:
        """Length of the packed vector."""
        return max(offset + length for offset, length in self.sections().values())


class SlotPacker:
    """Packs the state of slots for the device, on the host."""

    def __init__(self, sizes: CarrySizes) -> None:
        """Lay out the packed vector."""
        self._sizes = sizes
        self._sections = sizes.sections()

    def pack(
        self,
        *,
        slot: int,
        params: SamplingParams,
        seed: int,
        sample_index: int,
        end_ids: frozenset[int],
        token_ids: Sequence[int],
        num_prompt: int,
        block_table: Sequence[int],
    ) -> npt.NDArray[np.int32]:
        """One slot as i32[packed_size].

        Args:
            slot: which slot.
            params: the request's sampling parameters.
            seed: the request's seed, its own or one drawn for it.
            sample_index: which of the request's `n` samples.
            end_ids: tokens that end the sequence, which `min_tokens` holds back.  The device
                knows the lowest `MAX_STOP_IDS`; the host finds the others.
            token_ids: prompt and output so far.
            num_prompt: how many of them are prompt.
            block_table: the sequence's pages.
        """
        packed = np.zeros(self._sizes.packed_size, np.int32)
        view = {
            name: packed[offset : offset + length]
            for name, (offset, length) in self._sections.items()
        }
        view["slot"][0] = slot
        view["floats"].view(np.float32)[:] = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        low, high = np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)
        top_k = params.top_k if params.top_k > 0 else self._sizes.vocab_size
        view["ints"][:] = (
            low,
            high,
            sample_index,
            min(top_k, self._sizes.vocab_size),
            num_prompt + params.min_tokens,
            _flags(params),
        )
        view["num_prompt"][0] = num_prompt
        view["num_tokens"][0] = len(token_ids)
        view["tokens"][: len(token_ids)] = token_ids
        view["block_table"][: len(block_table)] = block_table
        bias = params.logit_bias or {}
        view["bias_ids"][:] = self._sizes.vocab_size
        view["bias_ids"][: len(bias)] = list(bias.keys())
        view["bias_values"].view(np.float32)[: len(bias)] = list(bias.values())
        view["end_ids"][:] = self._sizes.vocab_size
        known = sorted(end_ids)[:MAX_STOP_IDS]
        view["end_ids"][: len(known)] = known
        allowed = params.allowed_token_ids
        words = self._sizes.allowed_words
        view["allowed"][:] = -1 if allowed is None else pack_ids(allowed, words)
        return packed


def pack_ids(ids: Sequence[int], words: int) -> npt.NDArray[np.int32]:
    """A set of ids as bits, id 0 the lowest of the first of `words` 32-bit words."""
    bits = np.zeros(words * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _flags(params: SamplingParams) -> int:
    adjusts = (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
        or bool(params.logit_bias)
        or params.min_tokens > 0
    )
    masks = params.allowed_token_ids is not None or params.structured_outputs is not None
    samples = not params.is_greedy
    filters = samples and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return (
        ADJUSTS * adjusts
        | DRAWS * samples
        | FILTERS * filters
        | LOGPROBS * (params.logprobs is not None)
        | MASKS * masks
        | CONSTRAINED * (params.structured_outputs is not None)
    )


def set_slot(carry: Carry, packed: jax.Array, sizes: CarrySizes) -> Carry:
    """The carry with one slot replaced by a packed vector of `SlotPacker.pack`."""
    part = {
        name: lax.slice(packed, (offset,), (offset + length,))
        for name, (offset, length) in sizes.sections().items()
    }
    slot = part["slot"][0]
    position = jnp.arange(sizes.max_model_len, dtype=jnp.int32)
    num_prompt, num_tokens = part["num_prompt"][0], part["num_tokens"][0]
    # Ids that do not count point past the vocabulary, where the scatter drops them.
    prompt = jnp.where(position < num_prompt, part["tokens"], sizes.vocab_size)
    output = jnp.where(
        (position >= num_prompt) & (position < num_tokens), part["tokens"], sizes.vocab_size
    )
    counts = jnp.zeros(sizes.vocab_size, jnp.int32).at[output].add(1, mode="drop")
    seen = jnp.zeros(sizes.vocab_size, jnp.bool_).at[prompt].set(True, mode="drop")

    def float32(name: str) -> jax.Array:
        return lax.bitcast_convert_type(part[name], jnp.float32)

    return Carry(
        last_token=carry.last_token,
        block_table=carry.block_table.at[slot].set(part["block_table"]),
        output_counts=carry.output_counts.at[slot].set(counts),
        in_prompt=carry.in_prompt.at[slot].set(seen),
        floats=carry.floats.at[slot].set(float32("floats")),
        ints=carry.ints.at[slot].set(part["ints"]),
        bias_ids=carry.bias_ids.at[slot].set(part["bias_ids"]),
        bias_values=carry.bias_values.at[slot].set(float32("bias_values")),
        end_ids=carry.end_ids.at[slot].set(part["end_ids"]),
        ended=carry.ended.at[slot].set(False),
        allowed=carry.allowed.at[slot].set(part["allowed"]),
    )

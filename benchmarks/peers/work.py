"""The work that every engine is given: fixed batches, and ragged requests.

Random token ids from one seed, so that every machine computes the same.  Does not know engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
"""Of each request of the fixed work."""
RAGGED_TOKENS = (8855, 5936)
"""Prompt and output tokens of the ragged work: what says that another numpy draws the same."""


@dataclass(frozen=True)
class Request:
    """A prompt and how much to generate; end tokens are ignored."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Item:
    """One piece of work, the same for every engine."""

    kind: str
    """"fixed" (equal requests, all at once) or "ragged" (64 of many lengths, all at once)."""
    slots: int
    """Sequences that run at once; of fixed work, also the number of requests."""
    engine_slots: int
    """Slots that the engine is configured with: an engine may have more than an item uses."""
    requests: tuple[Request, ...]

    @property
    def name(self) -> str:
        """Short name, such as "ragged-16"."""
        return f"{self.kind}-{self.slots}"

    @property
    def output_tokens(self) -> int:
        """Tokens to generate in all."""
        return sum(request.max_tokens for request in self.requests)


def fixed_and_ragged() -> tuple[list[Request], list[Request]]:
    """32 requests of 128 prompt and 64 output tokens; 64 of 16..256 and 8..256.

    Prompt lengths of the ragged ones are uniform, output lengths lognormal around 48, clipped.

    Raises:
        RuntimeError: this numpy draws other numbers.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(16, 257, 64)
    outputs = np.clip(np.round(rng.lognormal(mean=np.log(48), sigma=1.0, size=64)), 8, 256)
    if (int(prompts.sum()), int(outputs.sum())) != RAGGED_TOKENS:
        raise RuntimeError(f"numpy {np.__version__} draws other numbers from seed 0; use another")

    def request(prompt_tokens: int, max_tokens: int) -> Request:
        return Request(rng.integers(100, 49_000, prompt_tokens).tolist(), max_tokens)

    ragged = [request(int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]
    fixed = [request(PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range(32)]
    return fixed, ragged


def items(fixed_slots: Sequence[int], ragged_slots: Sequence[int]) -> list[Item]:
    """The items of a run, those that need the same engine next to each other."""
    fixed, ragged = fixed_and_ragged()
    most = max([*fixed_slots, *ragged_slots])
    found = [Item("fixed", slots, most, tuple(fixed[:slots])) for slots in sorted(fixed_slots)]
    for slots in sorted(ragged_slots, reverse=True):
        found.append(Item("ragged", slots, slots, tuple(ragged)))
    return found


def small_items() -> list[Item]:
    """A few seconds of the same work, to try everything out."""
    fixed, ragged = fixed_and_ragged()
    return [
        Item("fixed", 8, 8, tuple(Request(r.prompt, 16) for r in fixed[:8])),
        Item("ragged", 8, 8, tuple(ragged[:16])),
    ]

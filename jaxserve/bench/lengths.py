"""How long the sequences of a batch are: the mixes that attention is measured with.

Knows numbers only.
"""

from __future__ import annotations

import random

MIXES = ("uniform", "zipf", "one-long")
_SHORT = 64
"""In the mix "one-long", how many times shorter the other sequences are."""


def make_lengths(mix: str, batch: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of `batch` sequences, the longest of `longest` tokens, in random order.

    "uniform" has them all equal, "zipf" has `longest / rank`, as in traffic where short requests
    are many (Zipf's law), and "one-long" has one among short ones.

    Raises:
        ValueError: there is no such mix.
    """
    if mix == "uniform":
        lengths = [longest] * batch
    elif mix == "zipf":
        lengths = [max(longest // rank, 1) for rank in range(1, batch + 1)]
    elif mix == "one-long":
        lengths = [longest] + [max(longest // _SHORT, 1)] * (batch - 1)
    else:
        raise ValueError(f"no mix of lengths {mix!r}; known are {', '.join(MIXES)}")
    random.Random(seed).shuffle(lengths)
    return lengths

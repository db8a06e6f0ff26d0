"""What a step reports: packed into one array on the device, taken apart on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.sampler import Sampled

RAN = 1
"""Row state: the device ran this step; set in every row of it."""
SAMPLED = 2
"""Row state: the token is the next of the row's sequence."""
BROKEN = 4
"""Row state: the row's logits were not finite."""


def report_width(num_top: int) -> int:
    """Columns of a packed report: token, row state, log-probability, rank, ids and values."""
    return 4 + 2 * num_top


def pack_report(sampled: Sampled, *, live: jax.Array, samples: jax.Array) -> jax.Array:
    """A step's report as i32[rows, report_width]: floats as their bits.

    Args:
        sampled: what the sampler says of every row.
        live: bool[rows], rows that computed something.
        samples: bool[rows], rows whose token their sequence takes.
    """

    def bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    broken = live & ~sampled.finite
    state = RAN + SAMPLED * samples.astype(jnp.int32) + BROKEN * broken.astype(jnp.int32)
    columns = [
        sampled.token[:, None],
        state[:, None],
        bits(sampled.logprob)[:, None],
        sampled.rank[:, None],
        sampled.top_ids,
        bits(sampled.top_logprobs),
    ]
    return jnp.concatenate(columns, axis=1)


class RowResults(NamedTuple):
    """A dispatch row by row."""

    num_steps: int
    """Steps that the device ran."""
    tokens: list[list[int]]
    """What each row sampled, in order.  A row that has ended samples no more."""
    failed: list[int]
    """Rows whose logits were not finite, after these tokens."""


@dataclass(frozen=True)
class StepOutput:
    """A report on the host.

    Of a dispatch, its arrays begin with an axis of steps, and row `i` belongs to entry `i` of the
    plan.  Of prompt log-probabilities there is no such axis, and rows are chunk rows.
    """

    token: npt.NDArray[np.int32]
    state: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]  # [..., rows, num_top]
    top_logprobs: npt.NDArray[np.float32]  # [..., rows, num_top]

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """Rows whose logits were finite, or that computed nothing."""
        finite: npt.NDArray[np.bool_] = self.state & BROKEN == 0
        return finite

    def rows(self, num_rows: int) -> RowResults:
        """What the first rows of a dispatch say; lists, as the host looks at them one by one."""
        tokens: list[list[int]] = [[] for _ in range(num_rows)]
        failed: list[int] = []
        num_steps = 0
        for states, sampled in zip(self.state.tolist(), self.token.tolist(), strict=True):
            num_steps += states[0] & RAN
            for row, state, token in zip(range(num_rows), states, sampled, strict=False):
                if state & SAMPLED:
                    tokens[row].append(token)
                elif state & BROKEN:
                    failed.append(row)
        return RowResults(num_steps, tokens, failed)


def unpack_report(out: npt.NDArray[np.int32], num_top: int) -> StepOutput:
    """The inverse of `pack_report`, on the host; `out` is i32[..., rows, report_width]."""
    floats = out.view(np.float32)
    return StepOutput(
        token=out[..., 0],
        state=out[..., 1],
        logprob=floats[..., 2],
        rank=out[..., 3],
        top_ids=out[..., 4 : 4 + num_top],
        top_logprobs=floats[..., 4 + num_top :],
    )

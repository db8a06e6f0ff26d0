"""What a step reports: packed into one array on the device, taken apart on the host."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxserve.sampler import Sampled


def report_width(num_top: int) -> int:
    """Columns of a packed report: token, finite flag, log-probability, rank, ids and values."""
    return 4 + 2 * num_top


def pack_report(sampled: Sampled) -> jax.Array:
    """A step's report as i32[rows, report_width]: floats as their bits."""

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


def unpack_report(out: npt.NDArray[np.int32], num_top: int) -> StepOutput:
    """The inverse of `pack_report`, on the host."""
    return StepOutput(
        token=out[:, 0],
        finite=out[:, 1] != 0,
        logprob=out[:, 2].view(np.float32),
        rank=out[:, 3],
        top_ids=out[:, 4 : 4 + num_top],
        top_logprobs=np.ascontiguousarray(out[:, 4 + num_top :]).view(np.float32),
    )

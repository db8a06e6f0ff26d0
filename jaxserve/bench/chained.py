"""Seconds per call of something on the device, from many calls chained inside one program.

Calls inside a program cost no dispatch from the host; each depends on the last, so that none is
hoisted or overlaps another.  The same chain without the call can be subtracted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.stages import Lowered

Body = Callable[[jax.Array, Any, Any], Any]
"""From the number of the call, the carried arrays and the operands to the next carried ones."""
REPEATS = 5
_FEEDBACK = 2.0**-10
"""Share of a result that goes into the next call: the numbers stay as random as they were."""


def fed_back(call: Callable[[jax.Array, jax.Array, Any], jax.Array]) -> Body:
    """A body whose carried array gets a little of each result added."""

    def body(i: jax.Array, x: jax.Array, operands: Any) -> jax.Array:
        return x + (call(i, x, operands) * _FEEDBACK).astype(x.dtype)

    return body


def nothing(i: jax.Array, x: jax.Array, operands: Any) -> jax.Array:
    """The call of the chain that is subtracted."""
    return x


def lower(body: Body, carry: Any, operands: Any, count: int) -> Lowered:
    """`count` chained calls as one program, `carry` donated; both arguments may be shapes."""

    def run(carry: Any, operands: Any) -> Any:
        def step(i: jax.Array, carry: Any) -> Any:
            # The barrier keeps the compiler from joining the work of two calls.
            return lax.optimization_barrier(body(i, carry, operands))

        return lax.fori_loop(0, count, step, carry)

    return jax.jit(run, donate_argnums=0).lower(carry, operands)


def seconds(compiled: Any, carry: Any, operands: Any, repeats: int = REPEATS) -> float:
    """Median time of a compiled chain, after one run that does not count; consumes `carry`."""
    carry = jax.block_until_ready(compiled(carry, operands))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        carry = jax.block_until_ready(compiled(carry, operands))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bandwidth(size_bytes: int = 4 << 30) -> float:
    """Bytes per second of a copy on the device, those read and those written."""
    count = 10
    x = jnp.arange(size_bytes // 4, dtype=jnp.float32)
    compiled = lower(lambda i, x, _: x + 1, x, None, count).compile()
    return 2 * x.nbytes * count / seconds(compiled, x, None)


def matmul_rate(size: int = 8192) -> float:
    """Operations per second of a square bfloat16 product of random numbers."""
    count = 10
    a, b = (
        jax.random.normal(key, (size, size), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0))
    )
    compiled = lower(lambda i, x, b: (x @ b) * size**-0.5, a, b, count).compile()
    return 2 * size**3 * count / seconds(compiled, a, b)

"""The sampler's forms against the plain ones they replace, op by op, and whole steps by request.

Old and new take turns on several arrays of logits in rotation (one array again and again teaches
the branch predictor what a top-k will find), so that a noisy machine disturbs both alike; medians
of single calls, in microseconds, and their ratio.

    python benchmarks/sampler.py --rows 8 32 --vocab 49152 --repeats 60 --json sampler.json
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.carry import Carry, CarrySizes, SlotPacker, set_slot
from jaxserve.sampler import Sampled, sample
from jaxserve.sampling.draw import inverse_cdf
from jaxserve.sampling.filters import draw_from_nucleus, kept_weights, thresholds
from jaxserve.sampling.largest import argmax, top_k
from jaxserve.sampling.logprobs import token_logprobs
from jaxserve.sampling_params import SamplingParams

NUM_TOP = 20
INPUTS = 8
Op = Callable[..., Any]


# The forms that were replaced


def plain_logprobs(logits: jax.Array, token: jax.Array) -> tuple[jax.Array, ...]:
    """XLA's own sums and top-k."""
    logits = lax.optimization_barrier(logits)
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    mine = jnp.take_along_axis(logits, token[:, None], 1)
    values, ids = lax.top_k(logits, NUM_TOP)
    return mine - normaliser, jnp.sum(logits > mine, -1), ids, values - normaliser


def threshold(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """Largest integer of each row for which a decreasing predicate is true, by bisection."""

    def bit(i: jax.Array, found: jax.Array) -> jax.Array:
        higher = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(higher), higher, found)

    found: jax.Array = lax.fori_loop(0, 32, bit, jnp.zeros(rows, jnp.uint32))
    return found


def ordered(x: jax.Array) -> jax.Array:
    """Floats as unsigned integers of the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def bisected_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest by counting over the vocabulary 32 times."""
    keys = ordered(logits)
    return threshold(lambda t: jnp.sum(keys >= t[:, None], -1) >= k, logits.shape[0])


def exponentials(logits: jax.Array) -> jax.Array:
    """Unnormalised probabilities at temperature 1."""
    scaled = lax.optimization_barrier(logits - logits.max(-1, keepdims=True))
    return jnp.exp(scaled)


def cumulative_draw(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Inverse of the cumulative sums of blocks of 64, then of one block."""
    blocks = weights.reshape(weights.shape[0], -1, 64)
    block = first_above(blocks.sum(-1), uniforms[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    return block * 64 + first_above(inside, uniforms[:, 1])


def first_above(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """First index whose cumulative weight exceeds `uniform` of the total."""
    cumulative = jnp.cumsum(weights, -1)
    return jnp.argmax(cumulative > uniform[:, None] * cumulative[:, -1:], -1)


def bisected_top_p(logits: jax.Array, top_p: jax.Array, uniforms: jax.Array) -> jax.Array:
    """The nucleus by summing over the vocabulary 32 times, then a draw."""
    weights, keys = exponentials(logits), ordered(logits)
    mass = top_p * weights.sum(-1)

    def enough(t: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(keys >= t[:, None], weights, 0.0), -1) >= mass

    kept = keys >= threshold(enough, logits.shape[0])[:, None]
    return cumulative_draw(jnp.where(kept, weights, 0.0), uniforms)


# The forms that replaced them


def all_weights(logits: jax.Array, min_p: float = 0.0) -> jax.Array:
    """Weights at temperature 1 without top-k."""
    like = jnp.ones(logits.shape[0])
    return kept_weights(logits, like, -jnp.inf * like, min_p * like)


def new_top_p(logits: jax.Array, top_p: jax.Array, uniforms: jax.Array) -> jax.Array:
    """The nucleus by rejection."""
    limited = top_p < 1
    again = jnp.stack([uniforms, *(jnp.roll(uniforms, i, 0) for i in range(1, 8))])
    weights = all_weights(logits)
    return draw_from_nucleus(logits, weights, top_p, limited, lambda i: again[i % 8])


def ops(rows: int) -> dict[str, tuple[Op, Op]]:
    """Old and new form of each op, as functions of logits."""
    rng = np.random.default_rng(0)
    uniforms = rng.random((rows, 2)).astype(np.float32)
    token = np.arange(rows, dtype=np.int32)
    some, most = np.full(rows, 40, np.int32), np.full(rows, 100, np.int32)
    top_p, every = np.full(rows, 0.9, np.float32), np.ones(rows, bool)
    return {
        "argmax": (lambda x: jnp.argmax(x, -1), argmax),
        f"top {NUM_TOP}": (lambda x: lax.top_k(x, NUM_TOP), lambda x: top_k(x, NUM_TOP)),
        "log-probabilities": (
            lambda x: plain_logprobs(x, token),
            lambda x: token_logprobs(x, token, NUM_TOP),
        ),
        "40th largest": (
            lambda x: bisected_top_k(x, some),
            lambda x: thresholds(x, some, every),
        ),
        "100th largest": (
            lambda x: bisected_top_k(x, most),
            lambda x: thresholds(x, most, every),
        ),
        "draw": (
            lambda x: cumulative_draw(exponentials(x), uniforms),
            lambda x: inverse_cdf(all_weights(x), uniforms)[0],
        ),
        "draw, top-p 0.9": (
            lambda x: bisected_top_p(x, top_p, uniforms),
            lambda x: new_top_p(x, top_p, uniforms),
        ),
    }


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, log-probabilities": {"temperature": 0, "logprobs": 5},
    "greedy, penalty": {"temperature": 0, "frequency_penalty": 0.5},
    "temperature 1": {"temperature": 1.0},
    "min-p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    "top-k 40": {"temperature": 0.8, "top_k": 40},
    "top-k 100": {"temperature": 0.8, "top_k": 100},
    "top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def carry_of(params: SamplingParams, rows: int, vocab: int) -> Carry:
    """A carry all of whose slots ask for the same."""
    sizes = CarrySizes(num_slots=rows, vocab_size=vocab, pages_per_seq=1, max_model_len=8)
    carry = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), sizes.abstract())
    put = jax.jit(functools.partial(set_slot, sizes=sizes), donate_argnums=0)
    for slot in range(rows):
        packed = SlotPacker(sizes).pack(
            slot=slot,
            params=params,
            seed=slot,
            sample_index=0,
            end_ids=frozenset(),
            token_ids=[1, 2],
            num_prompt=2,
            block_table=[1],
        )
        carry = put(carry, packed)
    return carry


def whole(logits: jax.Array, carry: Carry) -> Sampled:
    """One step's sampling."""
    rows = jnp.arange(logits.shape[0])
    return sample(
        lambda: logits,
        lambda: (argmax(logits), logits.max(-1)),
        carry,
        rows,
        rows + 4,
        rows >= 0,
        NUM_TOP,
    )


def some_logits(rows: int, vocab: int) -> list[jax.Array]:
    """Normal logits with a few likely tokens, as of a language model."""
    rng = np.random.default_rng(1)
    arrays = []
    for _ in range(INPUTS):
        logits = rng.standard_normal((rows, vocab), np.float32) * np.float32(2.5)
        likely = rng.integers(0, vocab, (rows, 30))
        logits[np.arange(rows)[:, None], likely] += rng.exponential(4, (rows, 30))
        arrays.append(jnp.asarray(logits))
    return arrays


def medians(
    calls: dict[str, Callable[[jax.Array], Any]], inputs: list[jax.Array], n: int
) -> dict[str, float]:
    """Microseconds of each call, all taking turns."""
    for call in calls.values():
        jax.block_until_ready(call(inputs[0]))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(n):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call(inputs[i % len(inputs)]))
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(taken) for name, taken in times.items()}


def run(rows: int, vocab: int, repeats: int) -> list[dict[str, Any]]:
    """One dictionary per line of the table."""
    inputs, lines = some_logits(rows, vocab), []
    for name, (old, new) in ops(rows).items():
        us = medians({"old": jax.jit(old), "new": jax.jit(new)}, inputs, repeats)
        lines.append({"op": name, "rows": rows, "vocab": vocab, **us})
    step = jax.jit(whole)
    calls = {}
    for name, asked in REQUESTS.items():
        carry = carry_of(SamplingParams(**asked), rows, vocab)
        calls[name] = functools.partial(lambda carry, logits: step(logits, carry), carry)
    for name, us_whole in medians(calls, inputs, repeats).items():
        lines.append({"op": f"step: {name}", "rows": rows, "vocab": vocab, "new": us_whole})
    return lines


def main() -> None:
    """Print the table; write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--vocab", type=int, default=49152, help="a multiple of 64")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    lines = [line for rows in args.rows for line in run(rows, args.vocab, args.repeats)]
    print(f"jax {jax.__version__}, {jax.default_backend()}, vocabulary {args.vocab}, us")
    print(f"{'op':36} {'rows':>5} {'old':>9} {'new':>9} {'old/new':>8}")
    for line in lines:
        old, new = line.get("old"), line["new"]
        before = f"{old:9.0f}" if old else " " * 9
        ratio = f"{old / new:8.1f}" if old else ""
        print(f"{line['op']:36} {line['rows']:5} {before} {new:9.0f} {ratio}")
    if args.json:
        report = {"jax": jax.__version__, "backend": jax.default_backend(), "lines": lines}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

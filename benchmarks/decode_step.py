"""The engine's decode step against a bare recipe of the same model, side by side in one process.

The recipe is what plain XLA can do on a CPU with nothing of an engine around it: one function of
raw arrays, fixed context, greedy, no batching logic (weights as rows, a table of rotary angles,
uint16 pages of 64 tokens, attention row by row over each row's own pages).  The two take turns,
so that a noisy machine disturbs both alike; ratios of medians are what counts.

    python benchmarks/decode_step.py --slots 8 32 --repeats 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from jaxserve import LLM, SamplingParams
from jaxserve.models.config import ModelConfig

PAGE = 64
CONTEXT = 160
STEPS = 16

Tree = Any


def recipe(config: ModelConfig, params: Tree) -> Callable[..., Any]:
    """One greedy decode step over raw arrays; every row is at the position it is told."""
    kv, dim, group = config.num_kv_heads, config.head_dim, config.num_heads // config.num_kv_heads
    hidden, eps = config.hidden_size, config.rms_eps
    bf16 = ml_dtypes.bfloat16

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        mean = jnp.mean(x * x, -1, keepdims=True)
        return (x * lax.rsqrt(mean + eps) * scale.astype(jnp.float32)).astype(bf16)

    def attend(q: jax.Array, pages: jax.Array, table: jax.Array, lens: jax.Array) -> jax.Array:
        def row(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            query, mine, length = args
            query = query.astype(jnp.float32).reshape(kv, group, dim) * dim**-0.5

            def page(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                largest, weight, total = state
                cells = lax.bitcast_convert_type(
                    lax.dynamic_index_in_dim(pages, mine[i], keepdims=False), bf16
                ).astype(jnp.float32)
                logits = jnp.einsum("hgd,htd->hgt", query, cells[0])
                logits = jnp.where(i * PAGE + jnp.arange(PAGE) < length, logits, -1e30)
                new = jnp.maximum(largest, logits.max(-1, keepdims=True))
                p, shrink = jnp.exp(logits - new), jnp.exp(largest - new)
                total = total * shrink + jnp.einsum("hgt,htd->hgd", p, cells[1])
                return new, weight * shrink + p.sum(-1, keepdims=True), total

            start = (
                jnp.full((kv, group, 1), -1e30),
                jnp.zeros((kv, group, 1)),
                jnp.zeros((kv, group, dim)),
            )
            _, weight, total = lax.fori_loop(0, (length + PAGE - 1) // PAGE, page, start)
            return (total / weight).reshape(-1).astype(bf16)

        return lax.map(row, (q, table, lens))

    def step(
        params: Tree,
        cache: tuple[jax.Array, ...],
        token: jax.Array,
        pos: jax.Array,
        table: jax.Array,
        angles: jax.Array,
    ) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
        rows = token.shape[0]
        x = params["embed"][token].astype(jnp.float32)
        page = jnp.take_along_axis(table, (pos // PAGE)[:, None], 1)[:, 0]
        cos, sin = jnp.split(angles[pos][:, None], 2, -1)

        def rotate(y: jax.Array) -> jax.Array:
            a, b = jnp.split(y, 2, -1)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(bf16)

        new_cache = []
        for i, pages in enumerate(cache):
            layer = params["layers"][i]
            qkv = product(norm(x, layer["attn_norm"]), layer["qkv"])
            qkv = qkv.reshape(rows, config.num_heads + 2 * kv, dim)
            q, k = rotate(qkv[:, : config.num_heads]), rotate(qkv[:, config.num_heads : -kv])
            v = qkv[:, -kv:].astype(bf16)
            cells = lax.bitcast_convert_type(jnp.stack([k, v], 1), jnp.uint16)
            pages = pages.at[page, :, :, pos % PAGE].set(cells)
            x = x + product(attend(q.reshape(rows, -1), pages, table, pos + 1), layer["out"])
            gate, up = jnp.split(product(norm(x, layer["mlp_norm"]), layer["gate_up"]), 2, -1)
            x = x + product((jax.nn.silu(gate) * up).astype(bf16), layer["down"])
            new_cache.append(pages)
        logits = product(norm(x, params["norm"]), params["embed"])
        return tuple(new_cache), jnp.argmax(logits, -1).astype(jnp.int32), pos + 1

    def flat(tree: Tree) -> Tree:
        """The canonical weights as the recipe's matrices."""
        layers = {}
        for i, layer in tree["layers"].items():
            attn, mlp = layer["attn"], layer["mlp"]
            qkv = np.asarray(attn["qkv"])
            parts = (qkv[:, :group], qkv[:, group], qkv[:, group + 1])
            layers[i] = {
                "attn_norm": layer["attn_norm"],
                "mlp_norm": layer["mlp_norm"],
                "qkv": jnp.asarray(np.concatenate([p.reshape(-1, hidden) for p in parts])),
                "out": attn["out"].reshape(hidden, -1),
                "gate_up": jnp.asarray(
                    np.asarray(mlp["gate_up"]).transpose(1, 0, 2).reshape(-1, hidden)
                ),
                "down": mlp["down"],
            }
        return {"embed": tree["embed"], "norm": tree["norm"], "layers": layers}

    weights = flat(params)
    inverse = config.rope.inv_freq(dim)
    angle = np.arange(2048)[:, None] * inverse
    angles = jnp.asarray(np.concatenate([np.cos(angle), np.sin(angle)], 1), jnp.float32)
    compiled = jax.jit(step, donate_argnums=1)

    def runner(slots: int) -> Callable[[], float]:
        per_slot = 512 // PAGE
        shape = (slots * per_slot + 1, 2, kv, PAGE, dim)
        state = {"cache": tuple(jnp.zeros(shape, jnp.uint16) for _ in range(config.num_layers))}
        table = jnp.asarray(1 + np.arange(slots * per_slot).reshape(slots, -1), jnp.int32)

        def run() -> float:
            token = jnp.zeros(slots, jnp.int32)
            pos = jnp.full(slots, CONTEXT - 8, jnp.int32)
            token.block_until_ready()
            start = time.perf_counter()
            for _ in range(STEPS):
                state["cache"], token, pos = compiled(
                    weights, state["cache"], token, pos, table, angles
                )
            token.block_until_ready()
            return (time.perf_counter() - start) / STEPS

        run()
        return run

    return runner


def engine_runner(llm: LLM, slots: int) -> Callable[[], tuple[float, float, float]]:
    """Seconds per decode step of the engine at the same context, and the host's part of it.

    The host's part twice: processor time of the engine's thread, and elapsed time in which it
    did not wait for the device.  XLA's threads take all cores of a small machine meanwhile, so
    the second is mostly the wait for a core, and overlaps the device's work.
    """
    rng = np.random.default_rng(0)
    ask = SamplingParams(temperature=0, max_tokens=STEPS + 9, ignore_eos=True, detokenize=False)

    def run() -> tuple[float, float, float]:
        engine = llm.engine
        engine.scheduler.reset_prefix_cache()
        prompts = rng.integers(3, llm.model_config.vocab_size, (slots, CONTEXT - 12))
        ids = [engine.submit(prompt, ask) for prompt in prompts.tolist()]
        while (
            any(not seq.in_decode for seq in engine.scheduler.running) or engine.scheduler.waiting
        ):
            engine.step()
        engine.step()
        engine.step()
        engine.reset_stats()
        start, work = time.perf_counter(), time.thread_time()
        for _ in range(STEPS):
            engine.step()
        elapsed = (time.perf_counter() - start) / STEPS
        work = (time.thread_time() - work) / STEPS
        stats = engine.stats()
        assert set(stats.steps_by_shape) == {f"decode{slots}"}, stats.steps_by_shape
        assert stats.host_s_per_step is not None
        while engine.has_work:
            engine.step()
        for request_id in ids:
            engine.take(request_id)
        return elapsed, work, stats.host_s_per_step

    run()
    return run


def main() -> None:
    """Print one JSON object per number of slots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    llm = LLM(
        max_num_seqs=max(args.slots),
        max_model_len=512,
        max_num_batched_tokens=512,
        prefill_buckets=(256,),
        batch_buckets=tuple(sorted(args.slots)),
        multi_step=1,
    )
    bare = recipe(llm.model_config, llm.params)
    for slots in args.slots:
        ours, theirs = engine_runner(llm, slots), bare(slots)
        theirs()
        ratios, ours_s, work_s, host_s, bare_s = [], [], [], [], []
        for _ in range(args.repeats):
            bare_s.append(theirs())
            elapsed, work, host = ours()
            ours_s.append(elapsed)
            work_s.append(work)
            host_s.append(host)
            ratios.append(elapsed / bare_s[-1])
        print(
            json.dumps(
                {
                    "jax": jax.__version__,
                    "slots": slots,
                    "engine_ms": round(1e3 * statistics.median(ours_s), 2),
                    "recipe_ms": round(1e3 * statistics.median(bare_s), 2),
                    "ratio_median": round(statistics.median(ratios), 3),
                    "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
                    "host_work_ms": round(1e3 * statistics.median(work_s), 2),
                    "host_work_share": round(
                        statistics.median(w / e for w, e in zip(work_s, ours_s, strict=True)), 3
                    ),
                    "host_elapsed_ms": round(1e3 * statistics.median(host_s), 2),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()

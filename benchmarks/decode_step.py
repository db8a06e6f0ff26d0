"""The engine's decode step against a bare recipe of the same model, side by side in one process.

The two take turns, so that a noisy machine disturbs both alike; ratios of medians are what counts.

    python benchmarks/decode_step.py --slots 8 32 --repeats 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from benchmarks.recipe import CONTEXT, STEPS, Recipe
from jaxserve import LLM, SamplingParams


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
    bare = Recipe(llm.model_config, llm.params)
    for slots in args.slots:
        ours, theirs = engine_runner(llm, slots), bare.runner(slots)
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

"""Behaviours that are about time, measured: the tests hold their counted forms.

    python benchmarks/timed_behaviours.py

B48: the slowest step after warm-up against the median.  B49: gaps between the tokens of running
streams while a long prompt is computed, against one chunk and one decode step.  B50: the step's
time as the batch grows, and with one long context among short ones.  B51: host time per step on
a model whose device time is nearly nothing, early and late.  Steps are single, so that each is
timed.  Run it on an idle machine.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams

TINY = Path(__file__).parents[1] / "tests" / "golden" / "llama-gqa"
RNG = np.random.default_rng(0)


def ask(max_tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def submit(llm: LLM, lengths: list[int], max_tokens: int) -> list[str]:
    """Submit random prompts of these lengths, none of them in the prefix cache."""
    llm.engine.scheduler.reset_prefix_cache()
    vocab = llm.model_config.vocab_size
    return [llm.engine.submit(RNG.integers(3, vocab, n).tolist(), ask(max_tokens)) for n in lengths]


def timed_steps(llm: LLM, count: int | None = None) -> list[float]:
    """Seconds of each of the next steps, or of all until there is no more work."""
    times = []
    while llm.engine.has_work and (count is None or len(times) < count):
        start = time.perf_counter()
        llm.engine.step()
        times.append(time.perf_counter() - start)
    return times


def settle(llm: LLM) -> None:
    """Step until every running sequence decodes."""
    scheduler = llm.engine.scheduler
    while scheduler.num_waiting or any(not seq.in_decode for seq in scheduler.running):
        llm.engine.step()
    timed_steps(llm, 2)


def drain(llm: LLM, ids: list[str]) -> None:
    """Run to the end and forget."""
    timed_steps(llm)
    for request_id in ids:
        llm.engine.take(request_id)


def slowest_step(llm: LLM) -> dict[str, Any]:
    """B48 on decode steps: three rounds of growing batches of prompts of any length."""
    worst = []
    for _ in range(3):
        for rows in (1, 5, 16):
            ids = submit(llm, RNG.integers(1, 300, rows).tolist(), 20)
            settle(llm)
            times = timed_steps(llm, 15)
            worst.append(max(times) / statistics.median(times))
            drain(llm, ids)
    return {"slowest_over_median": round(max(worst), 2), "bound": 5}


def long_prompt(llm: LLM) -> dict[str, Any]:
    """B49: four streams, then a prompt of many chunks."""
    ids = submit(llm, [20] * 4, 120)
    settle(llm)
    decode_s = statistics.median(timed_steps(llm, 10))
    ids += submit(llm, [llm.engine.scheduler.config.max_model_len - 8], 2)
    last, gaps = dict.fromkeys(ids[:4], time.perf_counter()), []
    chunk_s = []
    while llm.engine.scheduler.running.last.num_computed < 900:
        start = time.perf_counter()
        deltas = llm.engine.step()
        now = time.perf_counter()
        chunk_s.append(now - start)
        for d in deltas:
            if d.request_id in last:
                gaps.append(now - last[d.request_id])
                last[d.request_id] = now
    drain(llm, ids)
    bound = 1.5 * (statistics.median(chunk_s) + decode_s)
    return {
        "steps": len(chunk_s),
        "max_gap_ms": round(1e3 * max(gaps), 1),
        "bound_ms": round(1e3 * bound, 1),
    }


def batch_growth(llm: LLM) -> dict[str, Any]:
    """B50: step time by batch at equal context, and one context of 900 among seven of 16."""
    result: dict[str, Any] = {}
    for lengths in ([100], [100] * 4, [100] * 8, [100] * 16, [16] * 8, [900] + [16] * 7):
        ids = submit(llm, lengths, 30)
        settle(llm)
        name = f"{len(lengths)}x{lengths[-1]}" + ("+900" if lengths[0] == 900 else "")
        result[f"ms_{name}"] = round(1e3 * statistics.median(timed_steps(llm, 20)), 2)
        drain(llm, ids)
    return result


def host_per_step() -> dict[str, Any]:
    """B51: 32 slots, 200 steps of a model of two narrow layers."""
    llm = LLM(
        str(TINY), dtype="float32", max_num_seqs=32, max_model_len=256,
        max_num_batched_tokens=128, prefill_buckets=(64,), batch_buckets=(32,), num_kv_blocks=200,
        multi_step=1,
    )  # fmt: skip
    ids = submit(llm, [8] * 32, 205)
    settle(llm)
    host = []
    for _ in range(4):
        llm.engine.reset_stats()
        timed_steps(llm, 48)
        host.append(llm.engine.stats().host_s_per_step or 0.0)
    drain(llm, ids)
    return {
        "host_ms_by_quarter": [round(1e3 * h, 3) for h in host],
        "bound_ms": 1 + 0.05 * 32,
        "last_over_first": round(host[-1] / host[0], 2),
    }


def main() -> None:
    """Print one JSON object per behaviour."""
    llm = LLM(
        max_num_seqs=16, max_model_len=1024, max_num_batched_tokens=80, prefill_buckets=(64,),
        multi_step=1,
    )  # fmt: skip
    for name, measure in (
        ("B48", lambda: slowest_step(llm)),
        ("B49", lambda: long_prompt(llm)),
        ("B50", lambda: batch_growth(llm)),
        ("B51", host_per_step),
    ):
        print(json.dumps({"behaviour": name, **measure()}), flush=True)


if __name__ == "__main__":
    main()

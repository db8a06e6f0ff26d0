"""Decode steps of a model of real size with random weights, and the batching modes on it.

The floor of a step is its weights and its keys and values read once at the copy bandwidth.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.bench.chained import copy_bandwidth
from jaxserve.drive import run_all
from jaxserve.engine import Engine
from scheduler import BlockPool, Scheduler
from scheduler.policy import Dynamic, Static
from scripts.gpu_stages.context import Context, short
from scripts.gpu_stages.models import dummy

_SLOTS = {"llama3-8b": (1, 32, 256), "qwen3-0.6b": (1, 256), "tiny": (8,)}
_MODES_ON = ("qwen3-0.6b", "tiny")
_WINDOW_S = 0.05
"""How long dynamic batching waits for company."""
_SPREAD = 4.0
"""The longest answer of the workload of the modes over its mean; exponential below it."""


def run(context: Context) -> None:
    """The fewest slots first; then the modes, if this is the model for them."""
    name = context.argument
    slots = _SLOTS[name]
    chunk, context_len = (64, 64) if context.small else (2048, 1024)
    copy = copy_bandwidth(1 << 24 if context.small else 4 << 30)
    start = time.perf_counter()
    modes_slots = min(32, max(slots))
    modes = name in _MODES_ON
    llm = dummy(
        name,
        context.scratch,
        max_num_seqs=max(slots),
        max_model_len=2 * context_len,
        max_num_batched_tokens=chunk + max(slots),
        prefill_buckets=(chunk // 8, chunk) if modes else (chunk,),
        multi_step=1,
        batch_buckets=tuple(sorted({*slots, modes_slots})) if modes else slots,
    )
    result: dict[str, Any] = {
        "model": name,
        "ready_s": time.perf_counter() - start,
        "context": context_len,
        "copy_bytes_per_s": copy,
        **llm.engine.describe(),
        "decode": [],
        "complete": False,
    }
    context.save(result)
    for rows in slots:
        result["decode"].append(_decode(llm, rows, context_len, copy, context.small))
        result["compilations_after_ready"] = llm.engine.stats().compilations_after_ready
        context.save(result)
    if modes:
        result["modes"] = []
        for mode in ("continuous", "static", "dynamic"):
            try:
                row = _mode(llm, mode, modes_slots, context)
            except Exception as error:  # the other modes still have something to say
                row = {"mode": mode, "error": short(error)}
            result["modes"].append(row)
            context.save(result)
    result["compilations_after_ready"] = llm.engine.stats().compilations_after_ready
    result["complete"] = True
    context.save(result)
    llm.close()


def _decode(llm: LLM, rows: int, context_len: int, copy: float, small: bool) -> dict[str, Any]:
    """Seconds per decode step of `rows` sequences after their prefill."""
    engine = llm.engine
    engine.scheduler.reset_prefix_cache()
    steps = 4 if small else 50
    prompts = np.random.default_rng(0).integers(3, llm.model_config.vocab_size, (rows, context_len))
    ask = SamplingParams(
        temperature=0, max_tokens=steps + rows + 40, ignore_eos=True, detokenize=False
    )
    ids = [engine.submit(prompt, ask) for prompt in prompts.tolist()]
    start = time.perf_counter()
    while engine.scheduler.num_waiting or any(not s.in_decode for s in engine.scheduler.running):
        engine.step()
    prefill_s = time.perf_counter() - start
    for _ in range(3):
        engine.step()
    engine.reset_stats()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    step_s = (time.perf_counter() - start) / steps
    stats = engine.stats()
    cached = sum(seq.num_computed for seq in engine.scheduler.running)
    for request_id in ids:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    for request_id in ids:
        engine.take(request_id)
    floor_s = (_weight_bytes(llm) + cached * _token_bytes(llm)) / copy
    return {
        "slots": rows,
        "step_s": step_s,
        "tokens_per_s": rows / step_s,
        "floor_s": floor_s,
        "share_of_floor": floor_s / step_s,
        "host_s": stats.host_s_per_step,
        "prefill_tokens_per_s": rows * context_len / prefill_s,
        "steps_by_shape": stats.steps_by_shape,
    }


def _weight_bytes(llm: LLM) -> int:
    """Bytes of the weights that a step streams: an embedding that is only looked up is none."""
    weights: int = llm.engine.runner.memory()["weights_bytes"]
    if not llm.model_config.tie_embeddings:
        weights -= llm.params["embed"].nbytes
    return weights


def _token_bytes(llm: LLM) -> int:
    layout = llm.engine.runner.spec.layout
    return layout.page_bytes * llm.model_config.num_layers // layout.page_size


def _mode(llm: LLM, mode: str, slots: int, context: Context) -> dict[str, Any]:
    """One workload, all of it waiting from the start: answers of exponential lengths."""
    old = llm.engine.scheduler
    policy = {
        "continuous": None,
        "static": Static(),
        "dynamic": Dynamic(_WINDOW_S, time.monotonic),
    }[mode]
    limits = replace(old.config, max_num_seqs=slots)
    engine = Engine(
        llm.engine.runner,
        Scheduler(limits, BlockPool(old.pool.num_pages, old.pool.page_size), policy),
        llm.tokenizer,
        end_ids=frozenset(),
        seed=0,
        asynchronous=True,
    )
    rng = np.random.default_rng(0)
    count, mean = (2 * slots, 6) if context.small else (4 * slots, 96)
    lengths = np.minimum(rng.exponential(mean, count) + 1, _SPREAD * mean).astype(int)
    vocab = llm.model_config.vocab_size
    for length in lengths.tolist():
        prompt = rng.integers(3, vocab, 8 if context.small else 128).tolist()
        ask = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.submit(prompt, ask)
    start = time.perf_counter()
    outputs = list(run_all(engine))
    wall_s = time.perf_counter() - start
    stats = engine.stats()
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert tokens == lengths.sum()
    return {
        "mode": mode,
        "slots": slots,
        "requests": count,
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "steps": stats.steps,
        "steps_by_shape": stats.steps_by_shape,
        "slot_utilisation": tokens / (stats.steps * slots),
        "error": None,
    }

"""Checks and first timings on an accelerator, in one run of a few minutes.

Correctness: greedy tokens of the two tiny golden models in float32, and a fuzz of mixed requests
with no compile event.  Speed: decode steps of dummy models of real shapes, as a share of what
the machine's own copy bandwidth allows.  Every stage writes its JSON at once.

    python benchmarks/device_check.py --out DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import LLM, SamplingParams

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN3_06B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
SMALL = {
    **QWEN3_06B,
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
}


def copy_bandwidth(gib: float) -> float:
    """Bytes per second of a device copy, read and written."""
    x = jnp.zeros(int(gib * 2**30) // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = add(x).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            x = add(x)
        x.block_until_ready()
        times.append((time.perf_counter() - start) / 10)
    return 2 * x.nbytes / statistics.median(times)


def golden(name: str) -> dict[str, Any]:
    """Greedy tokens of a tiny model against those of transformers."""
    cases = json.loads((GOLDEN / name / "golden.json").read_text())["cases"]
    llm = LLM(
        str(GOLDEN / name), dtype="float32", max_num_seqs=8, max_num_batched_tokens=128,
        prefill_buckets=(64,), batch_buckets=(8,), max_model_len=256, num_kv_blocks=200,
    )  # fmt: skip
    outputs = llm.generate(
        [{"prompt_token_ids": case["prompt_ids"]} for case in cases],
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    )
    differing = []
    for i, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        pairs = zip(output.outputs[0].token_ids, case["output_ids"], strict=True)
        first = next((j for j, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            differing.append({"case": i, "token": first, "gap": case["top2_gaps"][first]})
    return {"model": name, "cases": len(cases), "differing": differing, **fuzz(llm)}


def fuzz(llm: LLM, count: int = 150) -> dict[str, Any]:
    """Mixed requests with aborts: compile events, and a canary before and after."""
    rng = np.random.default_rng(0)
    vocab = llm.model_config.vocab_size
    canary = {"prompt_token_ids": [5, 6, 7]}
    ask = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    before = llm.generate(canary, ask)[0].outputs[0].token_ids
    ids = []
    for i in range(count):
        params = SamplingParams(
            temperature=float(rng.choice([0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1, 0.8])),
            seed=i,
            max_tokens=int(rng.integers(1, 30)),
            logprobs=int(rng.choice([0, 3])),
            repetition_penalty=float(rng.choice([1, 1.2])),
            prompt_logprobs=int(i % 7 == 0) or None,
            ignore_eos=True,
        )
        prompt = rng.integers(0, vocab, rng.integers(1, 200)).tolist()
        ids.append(llm.engine.submit(prompt, params))
        llm.engine.step()
        if i % 5 == 0:
            llm.engine.abort(ids[int(rng.integers(len(ids)))])
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check()
    for request_id in ids:
        llm.engine.take(request_id)
    after = llm.generate(canary, ask)[0].outputs[0].token_ids
    return {
        "requests": count,
        "canary_unchanged": before == after,
        "compilations_after_ready": llm.engine.stats().compilations_after_ready,
    }


def decode(
    name: str, config: dict[str, Any], slots: list[int], context: int, scratch: Path, copy: float
) -> dict[str, Any]:
    """Seconds per decode step of a dummy model, and the floor of reading weights and KV once."""
    path = scratch / f"{name}.json"
    path.write_text(json.dumps(config))
    start = time.perf_counter()
    llm = LLM(
        str(path), load_format="dummy", max_num_seqs=max(slots), max_model_len=2 * context,
        max_num_batched_tokens=1024, prefill_buckets=(1024,), batch_buckets=tuple(slots),
    )  # fmt: skip
    report: dict[str, Any] = {
        "model": name,
        "ready_s": round(time.perf_counter() - start, 1),
        "context": context,
        **llm.engine.describe(),
        "decode": [],
    }
    rng = np.random.default_rng(0)
    ask = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, detokenize=False)
    kv_token = 4 * llm.model_config.num_layers * llm.model_config.num_kv_heads
    kv_token *= llm.model_config.head_dim
    weights = report["weights_bytes"]
    if not llm.model_config.tie_embeddings:
        weights -= 2 * llm.model_config.vocab_size * llm.model_config.hidden_size
    for rows in slots:
        engine = llm.engine
        engine.scheduler.reset_prefix_cache()
        prompts = rng.integers(3, config["vocab_size"], (rows, context)).tolist()
        ids = [engine.submit(prompt, ask) for prompt in prompts]
        start = time.perf_counter()
        while engine.scheduler.num_waiting or any(
            not s.in_decode for s in engine.scheduler.running
        ):
            engine.step()
        prefill_s = time.perf_counter() - start
        for _ in range(3):
            engine.step()
        engine.reset_stats()
        steps = 30
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        step_s = (time.perf_counter() - start) / steps
        stats = engine.stats()
        while engine.has_work:
            engine.step()
        for request_id in ids:
            engine.take(request_id)
        floor = (weights + rows * context * kv_token) / copy
        report["decode"].append(
            {
                "slots": rows,
                "step_ms": round(1e3 * step_s, 3),
                "tokens_per_s": round(rows / step_s, 1),
                "floor_ms": round(1e3 * floor, 3),
                "share_of_floor": round(floor / step_s, 3),
                "host_ms": round(1e3 * (stats.host_s_per_step or 0), 3),
                "prefill_tokens_per_s": round(rows * context / prefill_s),
            }
        )
    report["compilations_after_ready"] = llm.engine.stats().compilations_after_ready
    return report


def main() -> None:
    """Run the stages and write one JSON file each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="Tiny shapes, to try the script.")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    def stage(name: str, run: Callable[[], dict[str, Any]]) -> None:
        start = time.perf_counter()
        try:
            result = run()
        except Exception as error:  # the later stages still have something to say
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        result["stage_s"] = round(time.perf_counter() - start, 1)
        (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(name, json.dumps(result), flush=True)

    copy = copy_bandwidth(0.25 if args.small else 4)
    device = jax.devices()[0]
    stage(
        "device",
        lambda: {
            "jax": jax.__version__,
            "kind": device.device_kind,
            "platform": device.platform,
            "copy_gb_per_s": round(copy / 1e9, 1),
        },
    )
    for name in ("llama-gqa", "qwen3-llama3rope"):
        stage(name, lambda name=name: golden(name))
    if args.small:
        stage("small", lambda: decode("small", SMALL, [8], 64, args.out, copy))
        return
    stage("qwen3-0.6b", lambda: decode("qwen3-0.6b", QWEN3_06B, [1, 32], 1024, args.out, copy))
    stage("llama3-8b", lambda: decode("llama3-8b", LLAMA_8B, [1, 32], 1024, args.out, copy))


if __name__ == "__main__":
    main()

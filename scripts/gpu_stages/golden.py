"""Greedy tokens of the two golden models against transformers', and mixed requests on them.

The mixed requests come and go at random: nothing may be compiled for them, and a fixed request
must have the same answer before and after.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams
from scripts.gpu_stages.context import Context, short
from scripts.gpu_stages.models import dummy

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
_NEAR = 1e-3
"""Gap of the two best logits that the order of float32 sums may close."""


def run(context: Context) -> None:
    """Both golden models, and a model whose heads the kernels take for the mixed requests."""
    result: dict[str, Any] = {"checks": [], "complete": False}
    for name in ("tiny", "llama-gqa", "qwen3-llama3rope"):
        row: dict[str, Any] = {"check": name, "passed": False, "error": "did not come back"}
        result["checks"].append(row)
        context.save(result)
        try:
            row |= {"error": None, **_check(name, context)}
        except Exception as error:  # the other model still has something to say
            row["error"] = short(error)
        context.save(result)
    result["complete"] = True
    context.save(result)


def _check(name: str, context: Context) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "prefill_buckets": (64,),
        "batch_buckets": (8,),
        "max_model_len": 256,
        "num_kv_blocks": 200,
        "block_size": 16,
    }
    golden: dict[str, Any] = {"cases": 0, "differing": []}
    if name == "tiny":
        llm = dummy(name, context.scratch, **options)
    else:
        store = str(context.scratch / "executables")
        llm = LLM(str(GOLDEN / name), compilation_cache_dir=store, **options)
        golden = _golden(llm, name)
    fuzz = _fuzz(llm, 20 if context.small else 150)
    attention = llm.engine.runner.spec.attention
    llm.close()
    passed = not golden["differing"] and fuzz["canary_unchanged"]
    passed &= not fuzz["compilations_after_ready"]
    return {"attention": attention, **golden, **fuzz, "passed": passed}


def _golden(llm: LLM, name: str) -> dict[str, Any]:
    cases = json.loads((GOLDEN / name / "golden.json").read_text(encoding="utf-8"))["cases"]
    outputs = llm.generate(
        [{"prompt_token_ids": case["prompt_ids"]} for case in cases],
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    )
    differing = []
    for i, (case, output) in enumerate(zip(cases, outputs, strict=True)):
        pairs = zip(output.outputs[0].token_ids, case["output_ids"], strict=True)
        first = next((j for j, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None and case["top2_gaps"][first] > _NEAR:
            differing.append({"case": i, "token": first, "gap": case["top2_gaps"][first]})
    return {"cases": len(cases), "differing": differing}


def _fuzz(llm: LLM, count: int) -> dict[str, Any]:
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

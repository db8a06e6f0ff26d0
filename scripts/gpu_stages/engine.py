"""The engine on the device against the engine on the CPU, on a small model, and on itself.

In float32 the tokens must be the same, but where the two best logits are as near as rounding; in
16 and 8 bits log-probabilities are compared, and batched runs with runs alone, token for token.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from jaxserve import LLM, SamplingParams
from scripts.gpu_stages.context import Context, short
from scripts.gpu_stages.models import TINY, dummy

_OPTIONS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "batch_buckets": (8,),
    "prefill_buckets": (64,),
    "max_model_len": 512,
    "num_kv_blocks": 200,
    "block_size": 16,
    "max_logprobs": 2,
}
_NEAR = 1e-3
"""Gap of two float32 log-probabilities that rounding may close: sums of a few hundred terms."""
_TOLERANCE = {"bfloat16": 0.05, "int8": 0.1, "fp8": 0.15}
"""Of the mean difference of log-probabilities from the CPU's in bfloat16, over hundreds of them:
a few times what 8 and 3 bits of mantissa give; reading a wrong page gives whole units."""
_STDDEV = 0.12
"""Of the weights: attention is peaked, and the best token keeps changing."""


def run(context: Context) -> None:
    """Float32 first: it is the sharpest."""
    tokens = 8 if context.small else 48
    result: dict[str, Any] = {"checks": [], "complete": False}

    def check(name: str, of: Any) -> None:
        row: dict[str, Any] = {"check": name, "passed": False, "error": "did not come back"}
        result["checks"].append(row)
        context.save(result)
        try:
            row |= {"error": None, **of()}
        except Exception as error:  # the other checks still have something to say
            row["error"] = short(error)
        context.save(result)

    make = functools.partial(_engine, context)
    check("float32 tokens, device against CPU", lambda: _same_tokens(make, tokens))
    scores = functools.cache(lambda: _scores(make("bfloat16", "cpu", "auto", "auto")))
    for pages in ("bfloat16", "int8") if context.small else ("bfloat16", "int8", "fp8"):
        of = functools.partial(_near_scores, make, pages, "auto", tokens, scores)
        check(f"{pages} pages", of)
    if not context.small:
        of = functools.partial(_near_scores, make, "bfloat16", "pallas_mgpu", tokens, scores)
        check("bfloat16 pages, pallas_mgpu", of)
    result["complete"] = True
    context.save(result)


def _engine(context: Context, dtype: str, device: str, pages: str, attention: str) -> LLM:
    """An engine with the same weights on every platform."""
    llm = dummy(
        "tiny",
        context.scratch,
        dtype=dtype,
        device=device,
        kv_cache_dtype=pages,
        attention_backend=attention,
        **_OPTIONS,
    )
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: jax.Array) -> Any:
        norm = "norm" in jax.tree_util.keystr(path)
        return (rng.standard_normal(leaf.shape) * _STDDEV + norm).astype(leaf.dtype)

    llm.update_weights(jax.tree_util.tree_map_with_path(draw, llm.params))
    return llm


def _prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = (1, 7, 16, 33, 64, 120, 150, 200)
    return [rng.integers(3, TINY["vocab_size"], length).tolist() for length in lengths]


def _same_tokens(make: Any, tokens: int) -> dict[str, Any]:
    # The device's last: what is compiled after it is ready counts against it.
    there = make("float32", "cpu", "auto", "auto")
    here = make("float32", "auto", "auto", "auto")
    ask = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    pairs = list(zip(here.generate(_prompts(), ask), there.generate(_prompts(), ask), strict=True))
    differing, excused = 0, 0
    for ours, theirs in pairs:
        a, b = ours.outputs[0], theirs.outputs[0]
        first = next((i for i in range(tokens) if a.token_ids[i] != b.token_ids[i]), None)
        if first is None:
            continue
        best, second = sorted((x.logprob for x in b.logprobs[first].values()), reverse=True)[:2]
        near = best - second < _NEAR
        excused, differing = excused + near, differing + (not near)
    report = {
        "attention": here.engine.runner.spec.attention,
        "sequences": len(pairs),
        "distinct_tokens": len({t for ours, _ in pairs for t in ours.outputs[0].token_ids}),
        "differing": differing,
        "differing_within_rounding": int(excused),
        "compilations_after_ready": here.engine.stats().compilations_after_ready,
        "passed": differing == 0 and not here.engine.stats().compilations_after_ready,
    }
    here.close()
    there.close()
    return report


def _scores(llm: LLM) -> Any:
    """The log-probabilities of the prompts' tokens."""
    outputs = llm.score([prompt for prompt in _prompts() if len(prompt) > 1])
    return np.array([x for output in outputs for x in output.token_logprobs if x is not None])


def _near_scores(make: Any, pages: str, attention: str, tokens: int, scores: Any) -> dict[str, Any]:
    wanted = scores()  # before the engine is ready, whose compile events are counted
    llm = make("bfloat16", "auto", pages, attention)
    differences = np.abs(_scores(llm) - wanted)
    ask = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    together = [output.outputs[0].token_ids for output in llm.generate(_prompts(), ask)]
    llm.engine.scheduler.reset_prefix_cache()
    alone = [llm.generate([prompt], ask)[0].outputs[0].token_ids for prompt in _prompts()]
    compilations = llm.engine.stats().compilations_after_ready
    report = {
        "attention": llm.engine.runner.spec.attention,
        "distinct_tokens": len({token for tokens in together for token in tokens}),
        "largest_logprob_difference": float(differences.max()),
        "mean_logprob_difference": float(differences.mean()),
        "tolerance": _TOLERANCE[pages],
        "batched_equals_alone": together == alone,
        "compilations_after_ready": compilations,
        "passed": bool(
            differences.mean() < _TOLERANCE[pages] and together == alone and not compilations
        ),
    }
    llm.close()
    return report

"""MINI: a random-weight model small enough to recompute without a cache, and engines over it.

One runner, compiled once, serves every test of a session; an engine over it is cheap, so tests
make as many as they like, with any pool, budget or policy that fits the runner's shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve import sharding
from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.models.llama import Params, abstract_model
from jaxserve.outputs import Delta, RequestOutput
from jaxserve.runner import Runner
from jaxserve.sampling_params import SamplingParams
from jaxserve.startup import assemble
from jaxserve.tokenizer import Tokenizer
from scheduler import BlockPool, Scheduler, SchedulerConfig, SwapSpace
from tests.oracle import Oracle

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position=512,
    rms_eps=1e-5,
    rope=RopeConfig(),
    tie_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    sliding_windows=(None, None),
    eos_token_ids=(),
    bos_token_id=None,
)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "prefill_buckets": (16, 64),
    "block_size": 8,
    "max_model_len": 256,
    "num_kv_blocks": 300,
    "max_logprobs": 5,
    "multi_step": 8,
    "preemption": "swap",
    "swap_space_gib": 2**-7,
    "masked_steps": "off",
}


def random_params(config: ModelConfig, mesh: Mesh, seed: int = 0) -> Params:
    """Weights large enough that greedy tokens vary and top logits are well apart."""
    rng = np.random.default_rng(seed)
    _, state = abstract_model(config, np.dtype(np.float32))

    def make(path: tuple[Any, ...], like: jax.ShapeDtypeStruct) -> jax.Array:
        keys = tuple(getattr(key, "key", None) for key in path)
        weight = rng.standard_normal(like.shape) * 0.15 + ("norm" in str(keys[-1]))
        return jax.device_put(weight.astype(np.float32), sharding.of_weight(mesh, keys))

    tree = jax.tree_util.tree_map_with_path(make, nnx.to_pure_dict(state))
    assert isinstance(tree, dict)
    return tree


@dataclass(frozen=True)
class Mini:
    """A compiled runner over a small model, and the oracle of the same weights."""

    config: ModelConfig
    runner: Runner
    oracle: Oracle
    tokenizer: Tokenizer
    options: dict[str, Any]

    @classmethod
    def build(
        cls,
        executables: Path,
        config: ModelConfig = CONFIG,
        kernels: str | None = None,
        **options: Any,
    ) -> Mini:
        """Compile, or load what an earlier run compiled.

        Args:
            executables: where they are kept.
            config: of the model.
            kernels: instruction set of the CPU kernels that are loaded, if any.
            options: of the engine.
        """
        chosen = {**OPTIONS, **options}
        mesh = sharding.make_mesh("cpu", 1)
        params = random_params(config, mesh)
        tokenizer = Tokenizer.of_bytes()
        engine_config = EngineConfig(compilation_cache_dir=str(executables), **chosen)
        engine, _ = assemble(engine_config, config, params, tokenizer, mesh, kernels=kernels)
        return cls(config, engine.runner, Oracle(config, params), tokenizer, chosen)

    def engine(
        self,
        *,
        pages: int | None = None,
        budget: int | None = None,
        chunk: int | None = None,
        slots: int | None = None,
        max_len: int | None = None,
        eos: frozenset[int] = frozenset(),
        asynchronous: bool = True,
        multi_step: int = 1,
        seed: int = 0,
        host_pages: int | None = None,
        **limits: Any,
    ) -> Engine:
        """A fresh engine on the shared runner, within the limits it was compiled for.

        Args:
            pages: pages of the pool, the null page included.
            budget: token budget.
            chunk: most prefill tokens of a step.
            slots: sequences that run at once.
            max_len: longest sequence; lowered to what the pool holds.
            eos: end tokens of the model.
            asynchronous: one step in flight.
            multi_step: most decode steps of one dispatch.
            seed: of the requests without a seed.
            host_pages: pages of the swap space, which only `preemption="swap"` or "auto" uses.
            limits: further fields of `SchedulerConfig`.
        """
        pages = pages or self.options["num_kv_blocks"]
        page_size = self.runner.spec.layout.page_size
        budget = budget or self.options["max_num_batched_tokens"]
        chunk = min(chunk or budget, self.runner.shapes.max_chunk)
        longest = max_len or self.options["max_model_len"]
        host_pages = self.runner.num_host_pages if host_pages is None else host_pages
        config = SchedulerConfig(
            max_num_seqs=slots or self.options["max_num_seqs"],
            token_budget=max(budget, slots or self.options["max_num_seqs"]),
            max_prefill_tokens=chunk,
            max_model_len=min(longest, (pages - 1) * page_size + 1),
            multi_step=multi_step,
            **limits,
        )
        return Engine(
            self.runner,
            Scheduler(config, BlockPool(pages, page_size), swap_space=SwapSpace(host_pages)),
            self.tokenizer,
            end_ids=eos,
            seed=seed,
            asynchronous=asynchronous,
        )


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """Greedy parameters of a given length."""
    return replace(GREEDY, max_tokens=max_tokens, **fields)


def prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 256, n).tolist() for n in lengths]


def drain(engine: Engine) -> list[Delta]:
    """Step to the end, checking every invariant after each step; all deltas in order."""
    deltas = []
    while engine.has_work:
        deltas += engine.step()
        engine.scheduler.check()
    engine.check()
    return deltas


def run(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], every: int = 0
) -> list[RequestOutput]:
    """Submit and drain; with `every`, one request each so many steps instead of all at once."""
    ids = []
    for prompt, params in requests:
        ids.append(engine.submit(prompt, params))
        for _ in range(every):
            engine.step()
            engine.scheduler.check()
    drain(engine)
    return [engine.take(request_id) for request_id in ids]


def solo(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """Run requests one after another."""
    return [run(engine, [request])[0] for request in requests]


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of every sample of every request."""
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def logprobs(output: RequestOutput) -> list[float]:
    """Log-probabilities of the sampled tokens of a request's first sample."""
    sample = output.outputs[0]
    assert sample.logprobs is not None
    return [entry[t].logprob for entry, t in zip(sample.logprobs, sample.token_ids, strict=True)]

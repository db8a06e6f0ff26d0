"""8-bit weights in the model and the engine: XLA and kernels agree, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import sharding
from jaxserve.compilations import CompileCounter
from jaxserve.config import EngineConfig
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Params, bind
from jaxserve.models.scoring import dense_causal
from jaxserve.sampling_params import SamplingParams
from jaxserve.weights import CANONICAL, CPUPacked, Int8, WeightLayout, canonical, serve
from jaxserve.weights import weight_layout as chosen_layout
from tests.engine import native
from tests.engine.mini import CONFIG, Mini, greedy, logprobs, prompts, random_params, run, tokens
from tests.engine.test_cpu_kernels import TIE
from tests.engine.test_cpu_kernels import kernels as kernels
from tests.engine.weights import serving
from tests.oracle import Oracle, assert_same_greedy

ODD = replace(CONFIG, hidden_size=72, intermediate_size=80, vocab_size=290, tie_embeddings=False)
"""No size is whole panels or whole groups."""
TOKENS = np.array(prompts([40], seed=50)[0], np.int32)
BF16 = np.dtype(jnp.bfloat16)


def weights_of(config: ModelConfig) -> Params:
    params = random_params(config, sharding.make_mesh("cpu", 1))
    return jax.tree.map(lambda x: np.asarray(x).astype(BF16), params)


def logits_of(config: ModelConfig) -> Callable[[Any, Any], jax.Array]:
    @jax.jit
    def logits(served: Any, ids: Any) -> jax.Array:
        model = bind(config, served)
        return model.logits(model(ids, jnp.arange(len(ids)), dense_causal(config)))

    return logits


def assert_same_bits(a: Params, b: Params) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint16), np.asarray(y).view(np.uint16))


@pytest.fixture(scope="module", params=["kernels", "xla"])
def layout(request: pytest.FixtureRequest, kernels: str) -> WeightLayout:
    return CPUPacked(kernels, quantized=True) if request.param == "kernels" else Int8()


@pytest.fixture(scope="module")
def int8(executables: Path, kernels: str, layout: WeightLayout) -> Mini:
    few: dict[str, Any] = {"batch_buckets": (8,), "prefill_buckets": (64,)}
    return native.build(executables, kernels, layout, **few)


@pytest.mark.parametrize("config", [CONFIG, ODD], ids=["mini", "odd"])
def test_both_layouts_stand_for_the_same_weights(kernels: str, config: ModelConfig) -> None:
    params, packed = weights_of(config), CPUPacked(kernels, quantized=True)
    seen = canonical(serve(params, packed), packed)
    assert_same_bits(seen, canonical(serve(params, Int8()), Int8()))
    near = jax.tree.map(
        lambda a, b: np.abs(a - b).max() / np.abs(b).max(), *map(wide, (seen, params))
    )
    assert 0 < max(jax.tree.leaves(near)) < 0.01
    np.testing.assert_array_equal(seen["norm"], params["norm"])


def wide(params: Params) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@pytest.mark.parametrize("config", [CONFIG, ODD], ids=["mini", "odd"])
def test_logits_are_those_of_what_the_weights_stand_for(kernels: str, config: ModelConfig) -> None:
    """A dense float64 model of the same numbers is near; bfloat16 weights of them are the same."""
    params, logits = weights_of(config), logits_of(config)
    seen = canonical(serve(params, Int8()), Int8())
    want = Oracle(config, seen).logits(TOKENS.tolist())
    pairs = [(CPUPacked(kernels, quantized=True), CPUPacked(kernels)), (Int8(), CANONICAL)]
    for eight_bit, full in pairs:
        got = np.asarray(logits(serve(params, eight_bit), TOKENS))
        assert np.abs(got - want).max() < 0.02 * np.abs(want).max()
        np.testing.assert_array_equal(got, logits(serve(seen, full), TOKENS))
        assert not np.array_equal(got, logits(serve(params, full), TOKENS))


@pytest.mark.parametrize("config", [CONFIG, ODD], ids=["mini", "odd"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    kernels: str, config: ModelConfig
) -> None:
    """Whole models, one token at a position of its own per row; each attends to itself."""
    served = serve(weights_of(config), CPUPacked(kernels, quantized=True))

    @jax.jit
    def alone(ids: Any) -> jax.Array:
        model = bind(config, served)

        def attend(layer: int, qkv: jax.Array, rotate: Any) -> jax.Array:
            q, _, v = rotate.split(qkv)
            return jnp.repeat(v, q.shape[1] // v.shape[1], axis=1)

        return model.logits(model(ids, jnp.arange(len(ids)), attend))

    ids = np.array(prompts([64], seed=51)[0], np.int32)
    together = np.asarray(alone(ids))
    for rows in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63):
        np.testing.assert_array_equal(np.asarray(alone(ids[:rows])), together[:rows])


def test_greedy_tokens_are_those_of_what_the_weights_stand_for(int8: Mini) -> None:
    oracle = Oracle(CONFIG, int8.runner.params)
    asked = prompts([1, 2, 15, 16, 17, 40, 64], seed=52)
    outputs = run(int8.engine(multi_step=8), [(prompt, greedy(12)) for prompt in asked])
    for prompt, output in zip(asked, outputs, strict=True):
        want, gaps = oracle.greedy(prompt, 12)
        assert_same_greedy(output.outputs[0].token_ids, want, gaps, margin=TIE)


def test_close_to_full_weights(int8: Mini) -> None:
    asked = [(prompt, greedy(0, prompt_logprobs=0)) for prompt in prompts([60, 60], seed=53)]
    for output, (prompt, _) in zip(run(int8.engine(), asked), asked, strict=True):
        assert output.prompt_logprobs is not None
        got = [e[t].logprob for e, t in zip(output.prompt_logprobs, prompt, strict=True) if e]
        full = int8.oracle.logprobs(prompt)[np.arange(59), prompt[1:]]
        assert np.abs(np.array(got) - full).mean() < 0.05
        assert not np.array_equal(got, full)


def test_nothing_compiles_whatever_is_asked(int8: Mini) -> None:
    counter = CompileCounter()
    rich = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20, logprobs=3)
    asked = [(p, rich if i % 2 else greedy(20)) for i, p in enumerate(prompts([5, 9, 17, 33]))]
    together = run(int8.engine(multi_step=8), asked)
    engine = int8.engine()
    alone = [run(engine, [one])[0] for one in asked]
    assert tokens(alone) == tokens(together)
    assert logprobs(alone[1]) == pytest.approx(logprobs(together[1]), abs=1e-4)
    assert counter.count == 0


def test_new_weights_are_quantised_again(int8: Mini) -> None:
    engine, ask = int8.engine(), [(prompts([9])[0], greedy(12))]
    before, params = tokens(run(engine, ask)), int8.runner.params
    other = jax.tree.map(lambda x: np.ascontiguousarray(x[::-1]), params)
    counter = CompileCounter()
    engine.update_weights(other)
    assert tokens(run(engine, ask)) != before
    engine.update_weights(params)
    assert counter.count == 0
    changed = jax.tree.map(lambda a, b: (a != b).mean(), wide(int8.runner.params), wide(params))
    assert max(jax.tree.leaves(changed)) < 0.02  # what was given back went through 8 bits again


def test_weights_that_are_not_finite_end_the_request(int8: Mini) -> None:
    params = jax.tree.map(np.array, int8.runner.params)
    params["layers"][0]["mlp"]["down"][3, 5] = np.nan
    with serving(int8, params):
        output = run(int8.engine(), [(prompts([9])[0], greedy(12))])[0]
    assert output.error is not None
    assert "finite" in output.error


def test_what_is_served_is_said_and_small(int8: Mini, layout: WeightLayout) -> None:
    shown = int8.engine().describe()
    assert shown["weights"] == layout.name
    assert "int8" in layout.name
    assert shown["dtype"] == "bfloat16"
    params = weights_of(CONFIG)
    served, full = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        for tree in (serve(params, layout), params)
    )
    assert shown["weights_bytes"] == served
    assert served < 0.65 * full  # 8 bits, half a bit of scales, and panels that are not full


def options(**fields: Any) -> EngineConfig:
    return EngineConfig(quantization="int8", **fields)


def test_the_layout_that_serves() -> None:
    device = jax.devices("cpu")[0]
    assert chosen_layout(options(), BF16, device, "avx2").name == "packed-int8-avx2-1"
    assert chosen_layout(options(), BF16, device, None).name == "int8-1"
    assert chosen_layout(EngineConfig(), BF16, device, None) is CANONICAL
    with pytest.raises(
        ValueError, match="quantization='int8' needs dtype='bfloat16', not 'float32'"
    ):
        chosen_layout(options(), np.dtype(np.float32), device, "avx2")
    with pytest.raises(ValueError, match=r"runs on one device.*use quantization='none'"):
        chosen_layout(options(tensor_parallel_size=2), BF16, device, None)
    with pytest.raises(ValueError, match="quantization='int4' is not one of none, int8"):
        EngineConfig(quantization="int4")


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_it_lowers_for_other_devices(platform: str) -> None:
    """8-bit codes go in, products are of bfloat16."""
    served = serve(weights_of(CONFIG), Int8())
    traced = logits_of(CONFIG).trace(served, TOKENS)  # type: ignore[attr-defined]
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("xi8>") > 8
    assert "custom_call" not in text
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert sum(line.count("xbf16>") >= 2 for line in products) >= 8

"""Each implementation of attention that runs on a CPU, in the whole engine (B02, B07, B09)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.config import ATTENTION_BACKENDS, EngineConfig
from jaxserve.startup import assemble
from pallas_kernels import implementations, registry, tpu
from pallas_kernels.tpu_layout import tpu_layout
from tests.engine.mini import CONFIG, OPTIONS, Mini, greedy, prompts, random_params, run, tokens
from tests.engine.pages import assert_padding_writes_nothing
from tests.kernels import tpu_model
from tests.oracle import assert_same_greedy

WINDOW = 16
SHAPE = replace(CONFIG, num_heads=6, num_kv_heads=2, head_dim=32, sliding_windows=(WINDOW, None))
"""Sizes that every implementation serves; one layer sees everything, one a window."""
FIXED = {"block_size": 16, "batch_buckets": (8,), "prefill_buckets": (32,), "num_kv_blocks": 60}
ON_A_CPU = [
    name
    for name, one in implementations().items()
    if "cpu" in one.platforms and one.fused is None  # those have test_cpu_kernels.py
]
ASKED = [4, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW]


@pytest.fixture(scope="module", params=[*ON_A_CPU, "tpu"])
def backend(
    request: pytest.FixtureRequest, executables: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mini:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "tpu":
            _run_tpu_on_a_cpu(patch)
            # Kept executables are found by the sources they come from, the model not among them.
            executables = tmp_path_factory.mktemp("executables")
        mini = Mini.build(executables, SHAPE, attention_backend=request.param, **FIXED)
    assert mini.runner.spec.attention == request.param
    return mini


def _run_tpu_on_a_cpu(patch: pytest.MonkeyPatch) -> None:
    """Its layout and wrapping as they are, around a model of the kernel that TPUs run."""
    known = implementations()
    here = replace(
        known["tpu"],
        platforms=("cpu",),
        layout=lambda plain: replace(tpu_layout(replace(plain, platform="tpu")), platform="cpu"),
        refusal=lambda use: None,
    )
    patch.setattr(registry, "implementations", lambda: {**known, "tpu": here})
    patch.setattr(tpu, "in_tree", tpu_model.in_tree)


@pytest.fixture(scope="module", params=["int8", "fp8"])
def interpreted(request: pytest.FixtureRequest, executables: Path) -> Mini:
    """The kernels on quantised pages, in interpret mode."""
    return Mini.build(
        executables,
        SHAPE,
        attention_backend="pallas_interpret",
        kv_cache_dtype=request.param,
        **FIXED,
    )


def test_greedy_equals_the_oracle(backend: Mini) -> None:
    """Cache updates are carried from step to step, and windows are respected past their end."""
    asked = prompts(ASKED, seed=70)
    outputs = run(backend.engine(), [(prompt, greedy(3 * WINDOW)) for prompt in asked])
    for prompt, (got,) in zip(asked, tokens(outputs), strict=True):
        assert len(set(got)) > 1
        assert_same_greedy(got, *backend.oracle.greedy(prompt, 3 * WINDOW))


def test_solo_batched_chunked_preempted_and_shared(backend: Mini) -> None:
    _assert_invariant(backend)


def test_eight_bit_pages_in_the_kernels(interpreted: Mini) -> None:
    _assert_invariant(interpreted)


def test_padding_writes_nothing(backend: Mini) -> None:
    assert_padding_writes_nothing(backend, prompts([5, 19, 27], seed=2), max_tokens=8)
    asked = prompts([5, 19, 27], seed=3)
    assert_padding_writes_nothing(backend, asked, max_tokens=8, last_page=True)


def test_padding_writes_no_cell_and_no_scale(interpreted: Mini) -> None:
    assert_padding_writes_nothing(interpreted, prompts([5, 19], seed=2), max_tokens=8)


def _assert_invariant(one: Mini) -> None:
    asked = [(prompt, greedy(24)) for prompt in prompts(ASKED, seed=71)]
    want = [tokens(run(one.engine(), [request]))[0] for request in asked]
    assert tokens(run(one.engine(), asked)) == want
    assert tokens(run(one.engine(chunk=7, budget=15), asked, every=2)) == want
    small = one.engine(pages=9)
    assert tokens(run(small, asked)) == want
    assert small.stats().preemptions > 0
    engine = one.engine()
    run(engine, [(asked[-1][0], greedy(1))])
    again = run(engine, asked)
    assert tokens(again) == want
    assert again[-1].metrics.num_cached_tokens > 0


def test_names_in_the_configuration_are_those_of_the_registry() -> None:
    assert set(ATTENTION_BACKENDS) == {"auto", *implementations()}


def test_the_choice_is_logged_once(
    executables: Path, mini: Mini, caplog: pytest.LogCaptureFixture
) -> None:
    mesh = mini.runner.mesh
    config = EngineConfig(compilation_cache_dir=str(executables), **OPTIONS)
    with caplog.at_level(logging.INFO):
        assemble(config, CONFIG, random_params(CONFIG, mesh), mini.tokenizer, mesh)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("attention:")]
    assert lines == ["attention: xla, float32 pages of 8 tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "pallas_triton"}, r"'pallas_triton' runs on gpu, not on cpu"),
        ({"attention_backend": "tpu"}, r"'tpu' runs on tpu, not on cpu"),
        ({"attention_backend": "pallas_interpret"}, r"'pallas_interpret' .*head_dim.* not 16"),
        ({"attention_backend": "cuda"}, r"attention_backend='cuda' is not one of auto, xla"),
        ({"kv_cache_dtype": "int4"}, r"kv_cache_dtype='int4' is not one of auto, bfloat16, int8"),
        ({"kernel_table": "nowhere.json"}, r"cannot read kernel_table='nowhere.json'"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(
    mini: Mini, options: dict[str, str], message: str
) -> None:
    mesh = mini.runner.mesh
    with pytest.raises(ValueError, match=message):
        assemble(
            EngineConfig(**{**OPTIONS, **options}),
            CONFIG,
            mini.runner.params,
            mini.tokenizer,
            mesh,
        )


def test_float32_weights_with_bfloat16_pages(executables: Path, mini: Mini) -> None:
    half = Mini.build(
        executables, kv_cache_dtype="bfloat16", batch_buckets=(8,), prefill_buckets=(64,)
    )
    assert half.engine().describe()["kv_cache_dtype"] == "bfloat16"
    assert half.engine().describe()["dtype"] == "float32"
    asked = [(prompt, greedy(12, logprobs=0)) for prompt in prompts([9, 30], seed=72)]
    pairs = zip(run(half.engine(), asked), run(mini.engine(), asked), strict=True)
    for rounded, full in pairs:
        first = [next(iter(o.outputs[0].logprobs[0].values())).logprob for o in (rounded, full)]  # type: ignore[index]
        assert first[0] == pytest.approx(first[1], abs=0.05)
        assert first[0] != first[1]

"""Models from disk answer as the libraries they come from do (B43, B52, B54, B56, B59)."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.llm import LLM
from jaxserve.models.config import ModelConfig
from jaxserve.sampling_params import SamplingParams
from tests.engine.asks import FORCE, only
from tests.engine.golden import NAMES, ROOT, cases, load
from tests.engine.mini import CONFIG
from tests.engine.mini import OPTIONS as MINI_OPTIONS
from tests.loading.tiny import tiny_tensors, write_model
from tests.oracle import Oracle, assert_same_greedy

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, prompt_logprobs=0)


@pytest.fixture(scope="module", params=NAMES)
def golden(request: pytest.FixtureRequest, executables: Path) -> tuple[str, LLM]:
    return request.param, load(request.param, executables)


def test_golden_tokens_and_scores(golden: tuple[str, LLM]) -> None:
    """All together, in a cache too small for that, and one by one."""
    name, llm = golden
    for together in (True, False):
        wanted = cases(name)
        prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in wanted]
        if together:
            outputs = llm.generate(prompts, GREEDY)
            assert llm.engine.stats().preemptions > 0
        else:
            outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        for case, output in zip(wanted, outputs, strict=True):
            assert_same_greedy(only(output), case["output_ids"], case["top2_gaps"])
            entries, ids = output.prompt_logprobs, output.prompt_token_ids
            assert entries is not None
            scored = [e[t].logprob for e, t in zip(entries, ids, strict=True) if e is not None]
            assert scored == pytest.approx(case["prompt_logprobs"], abs=1e-4)
    assert llm.engine.stats().compilations_after_ready == 0


def test_golden_scores(golden: tuple[str, LLM]) -> None:
    name, llm = golden
    wanted = cases(name)
    for case, score in zip(wanted, llm.score([c["prompt_ids"] for c in wanted]), strict=True):
        assert score.token_logprobs[0] is None
        assert score.token_logprobs[1:] == pytest.approx(case["prompt_logprobs"], abs=1e-4)
        assert score.log_likelihood == pytest.approx(sum(case["prompt_logprobs"]), abs=1e-3)


def test_the_oracle_agrees_with_the_golden_models(golden: tuple[str, LLM]) -> None:
    """Three independent programs say the same: transformers, the engine and the oracle."""
    name, llm = golden
    oracle = Oracle(llm.model_config, llm.params)
    for case in cases(name):
        rows = oracle.logprobs(case["prompt_ids"])
        scored = [row[t] for row, t in zip(rows, case["prompt_ids"][1:], strict=False)]
        assert scored == pytest.approx(case["prompt_logprobs"], abs=1e-4)


def altered(directory: Path, name: str, head: np.ndarray | None = None, **config: Any) -> Path:
    """A copy of a golden model with another config.json and perhaps an output head."""
    shutil.copytree(ROOT / name, directory)
    old = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**old, **config}))
    if head is not None:
        tensors = load_file(directory / "model.safetensors")
        save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors")
    return directory


def test_a_head_in_a_tied_checkpoint_is_ignored(tmp_path: Path, executables: Path) -> None:
    head = np.random.default_rng(0).standard_normal((300, 64), np.float32)
    llm = load(altered(tmp_path / "model", "llama-gqa", head), executables)
    case = cases("llama-gqa")[3]
    output = llm.generate({"prompt_token_ids": case["prompt_ids"]}, GREEDY)[0]
    assert_same_greedy(only(output), case["output_ids"], case["top2_gaps"])


def test_an_untied_checkpoint_without_a_head_is_refused(tmp_path: Path, executables: Path) -> None:
    model = altered(tmp_path / "model", "llama-gqa", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load(model, executables)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_rope_scaling_that_is_not_supported_is_refused(
    tmp_path: Path, executables: Path, kind: str
) -> None:
    """Dynamic scaling would make a row's result depend on its length so far (B54)."""
    scaling = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0}
    model = altered(tmp_path / "model", "llama-gqa", rope_parameters=scaling)
    with pytest.raises(ValueError, match=kind):
        load(model, executables)


@pytest.fixture(scope="module")
def tall(tmp_path_factory: pytest.TempPathFactory, executables: Path) -> LLM:
    """Four heads of 32 in a hidden size of 64, a head of its own, no end token in config.json."""
    changes = {
        **CONFIG.to_hf(),
        "head_dim": 32,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    generator = np.random.default_rng(1)
    tensors = {
        name: like if "norm" in name else generator.standard_normal(like.shape, np.float32) * 0.15
        for name, like in tiny_tensors(ModelConfig.from_hf(changes)).items()
    }
    model = write_model(tmp_path_factory.mktemp("tall") / "model", tensors, **changes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "llama-gqa" / name, model)
    options = {**MINI_OPTIONS, "batch_buckets": (8,), "prefill_buckets": (16,)}
    return LLM(str(model), compilation_cache_dir=str(executables), **options)


def test_head_dim_is_not_hidden_over_heads(tall: LLM) -> None:
    assert tall.model_config.head_dim == 32
    oracle = Oracle(tall.model_config, tall.params)
    generator = np.random.default_rng(2)
    prompts = [generator.integers(0, 256, length).tolist() for length in (1, 9, 40)]
    for prompt, output in zip(prompts, tall.generate(prompts, GREEDY), strict=True):
        assert_same_greedy(only(output), *oracle.greedy(prompt, 32))
    for prompt, score in zip(prompts, tall.score(prompts), strict=True):
        rows = oracle.logprobs(prompt)
        want = [row[t] for row, t in zip(rows, prompt[1:], strict=False)]
        assert score.token_logprobs[1:] == pytest.approx(want, abs=1e-4)


def test_the_tokenizers_end_token_ends_an_answer(tall: LLM) -> None:
    """B59: it counts beside those of the model, which has none here."""
    assert tall.model_config.eos_token_ids == ()
    assert tall.engine.end_ids == {258}
    ask = SamplingParams(temperature=0, max_tokens=9, min_tokens=3, logit_bias={258: FORCE})
    sample = tall.generate("to be", ask)[0].outputs[0]
    assert sample.token_ids[3:] == [258]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
    assert sample.text == tall.tokenizer.decode(sample.token_ids[:3])


def test_a_context_that_the_cache_cannot_hold_is_lowered(
    executables: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B43: the context becomes what fits, with a warning; a longer prompt is refused at once."""
    with caplog.at_level(logging.WARNING, "jaxserve"):
        llm = load("llama-gqa", executables, max_model_len=512)
    assert llm.config.max_model_len == 257
    assert "max_model_len lowered from 512 to 257" in caplog.text
    with pytest.raises(ValueError, match=r"300 tokens.*257"):
        llm.generate([[5] * 300], GREEDY)
    output = llm.generate([[5] * 250], SamplingParams(temperature=0, max_tokens=100))[0]
    assert len(only(output)) == 7
    assert output.outputs[0].finish_reason == "length"

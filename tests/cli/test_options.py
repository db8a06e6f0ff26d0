"""Flags from dataclass fields, the profile, and who wins."""

import dataclasses
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig, load_profile
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured import StructuredOutputsParams

CONFIGS = Path(__file__).parents[2] / "configs"

ENGINE_FLAGS = {
    "model": ("m.gguf", "m.gguf"),
    "load_format": ("gguf", "gguf"),
    "tokenizer": ("t.json", "t.json"),
    "chat_template": ("c.jinja", "c.jinja"),
    "dtype": ("float32", "float32"),
    "quantization": ("int8", "int8"),
    "max_model_len": ("64", 64),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("100", 100),
    "kv_cache_dtype": ("int8", "int8"),
    "block_size": ("8", 8),
    "num_kv_blocks": ("50", 50),
    "memory_utilization": ("0.5", 0.5),
    "enable_prefix_caching": (False, False),
    "enable_chunked_prefill": (False, False),
    "scheduling_policy": ("priority", "priority"),
    "priority_ageing_s": ("30", 30.0),
    "fair_share": (True, True),
    "batching": ("dynamic", "dynamic"),
    "dynamic_window_ms": ("5", 5.0),
    "mixed": (False, False),
    "max_prefill_tokens": ("100", 100),
    "target_ttft_ms": ("500", 500.0),
    "target_tpot_ms": ("100", 100.0),
    "preemption": ("swap", "swap"),
    "swap_space_gib": ("2.5", 2.5),
    "async_scheduling": (False, False),
    "multi_step": ("4", 4),
    "batch_buckets": ("8,16", (8, 16)),
    "prefill_buckets": ("32", (32,)),
    "warm_up": (False, False),
    "deterministic": (True, True),
    "max_logprobs": ("5", 5),
    "tensor_parallel_size": ("2", 2),
    "device": ("cpu", "cpu"),
    "attention_backend": ("xla", "xla"),
    "cpu_kernels": ("avx2", "avx2"),
    "masked_steps": ("split", "split"),
    "kernel_table": ("sizes.json", "sizes.json"),
    "seed": ("7", 7),
    "cache_dir": ("/tmp/a", "/tmp/a"),
    "compilation_cache_dir": ("/tmp/b", "/tmp/b"),
}
NEEDED = {"priority_ageing_s": {"scheduling_policy": "priority"}}
"""Fields without which another is refused."""
SCORE_DEFAULTS = EngineConfig(warm_up=False)
"""A verb that ends after a few steps does not run every executable first."""
SAMPLING_FLAGS = {
    "n": (["--n", "2"], 2),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_p": (["--top-p", "0.9"], 0.9),
    "top_k": (["--top-k", "-1"], -1),
    "min_p": (["--min-p", "0.1"], 0.1),
    "presence_penalty": (["--presence-penalty", "-1"], -1.0),
    "frequency_penalty": (["--frequency-penalty", "1"], 1.0),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "seed": (["--seed", "-5"], -5),
    "stop": (["--stop", "a", "--stop", "b c"], ("a", "b c")),
    "stop_token_ids": (["--stop-token-ids", "4,5"], (4, 5)),
    "ignore_eos": (["--ignore-eos"], True),
    "max_tokens": (["--max-tokens", "9"], 9),
    "min_tokens": (["--min-tokens", "3"], 3),
    "logprobs": (["--logprobs", "0"], 0),
    "prompt_logprobs": (["--prompt-logprobs", "1"], 1),
    "logit_bias": (["--logit-bias", "5=-100", "--logit-bias", "6=1.5"], {5: -100.0, 6: 1.5}),
    "allowed_token_ids": (["--allowed-token-ids", "7"], (7,)),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "detokenize": (["--no-detokenize"], False),
    "structured_outputs": (
        ["--structured-outputs", '{"regex": "a+"}'],
        StructuredOutputsParams(regex="a+"),
    ),
}


def test_the_tables_name_every_field():
    assert ENGINE_FLAGS.keys() == {field.name for field in dataclasses.fields(EngineConfig)}
    assert SAMPLING_FLAGS.keys() == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("name", ENGINE_FLAGS)
def test_engine_flag_reaches_the_config(jaxserve_cli, fake_model, name):
    text, value = ENGINE_FLAGS[name]
    flag = "--" + name.replace("_", "-")
    switch = flag if text is True else "--no-" + flag[2:]
    arguments = [switch] if isinstance(text, bool) else [flag, text]
    needed = NEEDED.get(name, {})
    for other, its_value in needed.items():
        arguments += ["--" + other.replace("_", "-"), its_value]
    result = jaxserve_cli("score", "x", *arguments)
    assert result.exit_code == 0, result.output
    assert fake_model[0].config == dataclasses.replace(SCORE_DEFAULTS, **{name: value}, **needed)


@pytest.mark.parametrize("name", SAMPLING_FLAGS)
def test_sampling_flag_reaches_the_engine(jaxserve_cli, monkeypatch, name):
    arguments, value = SAMPLING_FLAGS[name]
    seen = []
    monkeypatch.setattr(
        "tests.cli.fakes.FakeEngine.submit",
        lambda self, ids, params, **kwargs: seen.append(params) or "r",
    )
    monkeypatch.setattr("tests.cli.fakes.FakeEngine.has_work", False)
    jaxserve_cli("generate", "x", "--json", *arguments)
    assert seen == [SamplingParams(**{name: value})]


def test_flag_wins_over_environment_over_file_over_default(jaxserve_cli, fake_model, tmp_path):
    profile = tmp_path / "p.yaml"
    profile.write_text("max-num-seqs: 5\nblock-size: 5\nmax-logprobs: 5\n")
    environment = {"JAXSERVE_SCORE_MAX_NUM_SEQS": "6", "JAXSERVE_SCORE_BLOCK_SIZE": "6"}
    result = jaxserve_cli("score", "x", "--config", profile, "--max-num-seqs", "7", env=environment)
    assert result.exit_code == 0, result.output
    assert fake_model[0].config == dataclasses.replace(
        SCORE_DEFAULTS, max_num_seqs=7, block_size=6, max_logprobs=5
    )


def test_environment_names_the_verb(jaxserve_cli, fake_model, tmp_path):
    jaxserve_cli("score", "x", env={"JAXSERVE_GENERATE_MAX_NUM_SEQS": "6"})
    assert fake_model[0].config == SCORE_DEFAULTS


def test_file_may_hold_the_verbs_own_flags(jaxserve_cli, tmp_path):
    profile = tmp_path / "p.yaml"
    profile.write_text("max-tokens: 3\nstop: [a, b]\njson: true\nbatch-buckets: [8, 64]\n")
    result = jaxserve_cli("generate", "x", env={"JAXSERVE_GENERATE_CONFIG": str(profile)})
    assert result.exit_code == 0, result.output
    assert '"finish_reason":"length"' in result.stdout


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("max-num-sequences: 3\nspeed: high\n", ["max_num_sequences, speed", "max_num_seqs"]),
        ("max-num-seqs: 16.5\n", ["max_num_seqs", "16.5"]),
        ("max-num-seqs: true\n", ["max_num_seqs", "true"]),
        ("dtype: float64\n", ["dtype", "float64"]),
        ("batch-buckets: [8, x]\n", ["batch_buckets", "8,x"]),
        ("max-num-seqs: {a: 1}\n", ["flat mapping"]),
        ("- a\n", ["flat mapping"]),
        ("a: [\n", ["not valid YAML"]),
        ("max-num-seqs: 0\n", ["max_num_seqs=0"]),
        ("priority-ageing-s: 9\n", ["priority_ageing_s=9", "scheduling_policy=priority"]),
        ("target-tpot-ms: 0\n", ["target_tpot_ms=0", "above 0"]),
        ("dynamic-window-ms: -1\n", ["dynamic_window_ms=-1", "at least 0"]),
        ("max-prefill-tokens: 0\n", ["max_prefill_tokens=0", "at least 1"]),
        ("batching: greedy\n", ["batching", "continuous"]),
    ],
)
def test_bad_file_is_one_line(jaxserve_cli, tmp_path, content, words):
    profile = tmp_path / "p.yaml"
    profile.write_text(content)
    result = jaxserve_cli("score", "x", "--config", profile)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert all(word in line for word in words), line


def test_missing_file_is_one_line(jaxserve_cli):
    result = jaxserve_cli("score", "x", "--config", "no-such-profile")
    assert result.exit_code == 1
    assert "no-such-profile" in result.stderr


def test_null_means_the_default(jaxserve_cli, fake_model, tmp_path):
    profile = tmp_path / "p.yaml"
    profile.write_text("num-kv-blocks: null\nmax-num-seqs:\n")
    jaxserve_cli("score", "x", "--config", profile)
    assert fake_model[0].config == SCORE_DEFAULTS


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_profile_is_valid_and_known_by_name(jaxserve_cli, fake_model, path):
    expected = EngineConfig.from_mapping({"warm_up": False, **load_profile(path)})
    result = jaxserve_cli("score", "x", "--config", path.stem)
    assert result.exit_code == 0, result.output
    assert fake_model[0].config == expected

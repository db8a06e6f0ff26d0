"""The engine runs where only its core's packages are: nothing else is imported before its use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.loading import load_config, resolve, weight_dtype
from jaxserve.served_weights import served_weights
from jaxserve.sharding import make_mesh
from jaxserve.weights import WeightLayout
from tests.loading.gguf_files import write_gguf

ROOT = Path(__file__).parents[1]
ABSENT = ("gguf", "msgspec", "llguidance", "starlette", "transformers", "huggingface_hub")
PROGRAM = """
import json, pathlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Absent())
from jaxserve import LLM, SamplingParams
import jaxserve.bench.kernels, jaxserve.bench.tune
from scripts.gpu_stages import decode, device, engine, golden, kernels, roofline, tuner

model = pathlib.Path({directory!r}) / "config.json"
model.write_text(json.dumps(dict(
    model_type="llama", vocab_size=300, hidden_size=32, intermediate_size=48,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True,
)))
llm = LLM(
    str(model), load_format="dummy", max_num_seqs=8, max_num_batched_tokens=32,
    batch_buckets=(8,), prefill_buckets=(16,), compilation_cache_dir={directory!r},
    warm_up=False,
)
(output,) = llm.generate("hello", SamplingParams(max_tokens=4, ignore_eos=True))
print(len(output.outputs[0].token_ids))
"""


def test_the_engine_runs_without_the_packages_of_its_surroundings(tmp_path: Path) -> None:
    program = PROGRAM.format(absent=set(ABSENT), directory=str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "4\n"


UNUSED = (
    "gguf",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "matplotlib",
    "orbax",
    "pandas",
    "prometheus_client",
    "scipy",
    "starlette",
    "tensorflow",
    "torch",
    "tqdm",
    "transformers",
)
"""What `jaxserve generate` has no use for once the model has been converted."""
GENERATE = """
import sys
from jaxserve.cli import main

main(sys.argv[1:], standalone_mode=False)
print(sorted({{m.partition(".")[0] for m in sys.modules}} & {unused}))
"""


def test_generate_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    """Every import is paid by every start."""
    model = write_gguf(tmp_path / "m.gguf", ROOT / "tests" / "golden" / "llama-gqa")
    source = resolve(EngineConfig(model=str(model), cache_dir=str(tmp_path)))
    served_weights(
        source,
        load_config(source),
        weight_dtype("auto"),
        WeightLayout(),
        make_mesh("cpu", 1),
        tmp_path / "weights",
    )
    options = {
        "--model": model,
        "--cache-dir": tmp_path,
        "--cpu-kernels": "off",
        "--max-num-seqs": 8,
        "--max-num-batched-tokens": 32,
        "--batch-buckets": 8,
        "--prefill-buckets": 16,
        "--num-kv-blocks": 4,
        "--max-tokens": 2,
    }
    arguments = [str(part) for option in options.items() for part in option]
    program = GENERATE.format(unused=set(UNUSED))
    run = subprocess.run(
        [sys.executable, "-c", program, "generate", "the", *arguments],
        cwd=ROOT,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "[]"

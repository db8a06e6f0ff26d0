"""The engine runs where only its core's packages are: nothing else is imported before its use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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

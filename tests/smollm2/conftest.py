from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve import LLM
from tests.demo import demo_source


@pytest.fixture(scope="session")
def executables(request: pytest.FixtureRequest) -> str:
    """Compiled executables, shared by the tests of a run and found again by the next run."""
    cache = request.config.cache
    assert cache is not None
    return str(Path(cache.mkdir("executables")))


@pytest.fixture(scope="module")
def f32(executables: str) -> LLM:
    """The demo model in float32, for numbers."""
    demo_source()
    return LLM(
        dtype="float32",
        max_num_seqs=8,
        max_model_len=512,
        max_num_batched_tokens=136,
        prefill_buckets=(128,),
        num_kv_blocks=40,
        masked_steps="off",
        warm_up=False,
        compilation_cache_dir=executables,
    )


@pytest.fixture(scope="session")
def bf16(executables: str) -> LLM:
    """The demo model as users run it, with 16 slots."""
    demo_source()
    return LLM(
        max_num_seqs=16,
        max_model_len=1024,
        max_num_batched_tokens=272,
        batch_buckets=(16,),
        prefill_buckets=(256,),
        warm_up=False,
        compilation_cache_dir=executables,
    )

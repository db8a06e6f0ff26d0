"""What others' attention takes for a cell: cuDNN's paged attention and torch's dense one.

Each gives seconds per call, or says why it cannot.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench import chained
from jaxserve.bench.kernel_case import Case, plain_layout, queries, random_pages

_MOST_COPIES = 8
_COUNT = 16


def cudnn(case: Case) -> float | str:
    """cuDNN's paged attention through JAX's private wrapper.

    It wants as many pages as the block tables have entries, so it could not serve a shared pool;
    here every sequence gets a full table, and the keys past its length are masked.
    """
    cell = case.cell
    if cell.op != "decode" or cell.kv_dtype != "bfloat16":
        return "takes decodes over bfloat16 pages only"
    try:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention
    except ImportError as error:
        return f"this JAX has no paged attention of cuDNN: {error}"
    copies = min(case.copies, _MOST_COPIES)
    blocks = -(-cell.context // cell.page_size)
    count = cell.batch * blocks
    pages = random_pages(plain_layout(cell, case.heads, "gpu"), count)
    # Keys and values of its own, page for page in an order that the tables undo.
    keys = [jnp.copy(pages.cells[:, 0]) for _ in range(copies)]
    values = [jnp.copy(pages.cells[:, 1]) for _ in range(copies)]
    del pages
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    operands = {
        "keys": keys,
        "values": values,
        "table": jnp.asarray(order.reshape(cell.batch, 1, blocks, 1)),
        "kv_lens": jnp.asarray(case.kv_lens),
        "q_lens": jnp.ones(cell.batch, jnp.int32),
    }

    def body(i: jax.Array, q: jax.Array, operands: Any) -> jax.Array:
        for k, v in zip(operands["keys"], operands["values"], strict=True):
            out = paged_attention(
                q[:, :, None],
                k,
                v,
                operands["q_lens"],
                operands["kv_lens"],
                operands["table"],
                operands["table"],
                scale=case.heads.head_dim**-0.5,
                mask_type=MaskType.PADDING,
                qkv_layout="BNTH",
            )
            q = chained.fed_back(lambda i, x, out: out[:, :, 0])(i, q, out)
        return q

    q = queries(case)
    rounds = max(1, _COUNT // copies)
    compiled = chained.lower(body, q, operands, rounds).compile()
    return chained.seconds(compiled, q, operands) / (rounds * copies)


def torch_dense(case: Case) -> float | str:
    """torch's scaled_dot_product_attention over dense keys and values of one length.

    The query heads of a KV head stand in for query tokens, which is the same attention, since no
    token is masked, and lets every backend of torch take it.
    """
    cell, heads = case.cell, case.heads
    if cell.op != "decode" or cell.kv_dtype != "bfloat16" or cell.mix != "uniform":
        return "takes decodes of one length over bfloat16 only"
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    copies = min(case.copies, _MOST_COPIES)

    def normal(tokens: int) -> Any:
        shape = (cell.batch, heads.num_kv_heads, tokens, heads.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    pairs = [(normal(cell.context), normal(cell.context)) for _ in range(copies)]
    q = normal(heads.group)

    def calls() -> None:
        for k, v in pairs:
            torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return _torch_seconds(torch, calls, max(1, _COUNT // copies)) / copies


def _torch_seconds(torch: Any, calls: Callable[[], None], rounds: int) -> float:
    """Median seconds of a round, replayed as a CUDA graph so that no launch is waited for."""
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            calls()
    graph.replay()
    times = []
    for _ in range(chained.REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    took = statistics.median(times)
    return took / rounds if took > 0 else math.nan


BASELINES: dict[str, Callable[[Case], float | str]] = {
    "cudnn paged": cudnn,
    "torch dense": torch_dense,
}

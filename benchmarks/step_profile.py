"""Where the time of a decode step goes on a CPU, from JAX's own profiler, and how far that is from
the memory's floor.

    python -m benchmarks.step_profile --slots 1,8,16,32

Every operation of the compiled step is timed by XLA's thunk executor while the engine decodes the
demo model; operations are grouped by what they are for.  "Between" is the time in which no
operation of the step ran: the executor's own, and the host's where the device waited for it.
"""

from __future__ import annotations

import collections
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np
from jax.profiler import ProfileData

from jaxserve import LLM, SamplingParams
from pallas_kernels.cpu import ops

PARTS = {
    "norm_linear": "norm, query, key and value",
    "rotate_write_attend": "rotate, write, attend",
    "linear_add": "output and down projections",
    "norm_swiglu": "norm, gate and up, SwiGLU",
    "norm_argmax": "norm, head, argmax",
    "weight_rows": "embedding rows",
}
OTHER = "everything left to XLA"
PROMPT, TOKENS = 128, 64


def decode(llm: LLM, slots: int, folder: str) -> tuple[float, int]:
    """Seconds and steps of pure decode steps, traced into `folder`."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng(slots)
    for _ in range(slots):
        llm.engine.submit(rng.integers(100, 40000, PROMPT).tolist(), params)
    while any(not seq.in_decode for seq in llm.engine.scheduler.running) or (
        llm.engine.scheduler.num_waiting
    ):
        llm.engine.step()
    for _ in range(2):
        llm.engine.step()  # the last one with prompt tokens may still be in flight
    llm.engine.reset_stats()
    with jax.profiler.trace(folder):
        start = time.perf_counter()
        while llm.engine.has_work:
            llm.engine.step()
        seconds = time.perf_counter() - start
    return seconds, llm.engine.stats().steps


def targets(llm: LLM, slots: int) -> dict[str, str]:
    """Name of every kernel call of the decode step, and which kernel it is."""
    runner = llm.engine.runner
    text = runner._steps[runner.shapes.choose(slots, 0)].result().as_text()
    parts = "|".join(PARTS)
    call = re.compile(rf'%([\w.\-]+) = .*custom_call_target="jaxserve_\w+?_({parts})"')
    return {match[1]: match[2] for match in map(call.search, text.splitlines()) if match}


def events(folder: str) -> Iterator[tuple[str, float]]:
    """Operations of the trace with their milliseconds, containers left out."""
    (path,) = Path(folder).rglob("*.xplane.pb")
    containers = re.compile(r"^(while|cond|call|ThunkExecutor|region)|completion|::| ")
    for plane in ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            if line.name.startswith("tf_XLA"):
                for event in line.events:
                    if not containers.search(event.name):
                        yield event.name, event.duration_ns / 1e6


def bandwidth(kernels: str) -> float:
    """GB/s that the kernels read from memory: one row times half a gigabyte of weights."""
    weights = jnp.zeros((5000, 512, 32, 2), jnp.bfloat16)
    row, used = jnp.zeros((1, 1024), jnp.bfloat16), jnp.int32(1)
    call = jax.jit(lambda w: ops.linear(kernels, row, used, w, 160_000))
    call(weights).block_until_ready()
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        call(weights).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return weights.nbytes / statistics.median(seconds) / 1e9


@click.command()
@click.option("--slots", default="1,8,16,32", show_default=True, help="Sequences that decode.")
@click.option("--quantization", default="none", show_default=True, help="Of the weights.")
def main(slots: str, quantization: str) -> None:
    """Print a table of milliseconds per step."""
    counts = [int(n) for n in slots.split(",")]
    llm = LLM(
        max_num_seqs=max(counts),
        max_model_len=1024,
        num_kv_blocks=3 * max(counts) + 40,
        enable_prefix_caching=False,
        quantization=quantization,
    )
    attention = llm.engine.runner.spec.attention
    if not attention.startswith("cpu_"):
        raise click.ClickException(f"the CPU kernels are not in use, but {attention}")
    table: dict[str, list[float]] = collections.defaultdict(list)
    for n in counts:
        with tempfile.TemporaryDirectory() as folder:
            decode(llm, n, folder)
        with tempfile.TemporaryDirectory() as folder:
            seconds, steps = decode(llm, n, folder)
            names, spent = targets(llm, n), collections.Counter[str]()
            for name, milliseconds in events(folder):
                spent[PARTS.get(names.get(name, ""), OTHER)] += milliseconds / steps
        for part in (*PARTS.values(), OTHER):
            table[part].append(spent[part])
        total = seconds / steps * 1e3
        table["between"].append(total - sum(spent.values()))
        table["step"].append(total)
    rate = bandwidth(attention.removeprefix("cpu_"))
    weights = llm.engine.runner.memory()["weights_bytes"]
    token = llm.engine.runner.spec.layout.page_bytes * llm.model_config.num_layers
    token /= llm.engine.runner.spec.layout.page_size
    for n in counts:
        read = weights + n * (PROMPT + TOKENS / 2) * token
        table[f"floor: its bytes at {rate:.1f} GB/s"].append(read / rate / 1e6)
    click.echo("| ms a step | " + " | ".join(f"{n} slots" for n in counts) + " |")
    click.echo("|---" * (len(counts) + 1) + "|")
    for part, row in table.items():
        click.echo(f"| {part} | " + " | ".join(f"{x:.2f}" for x in row) + " |")


if __name__ == "__main__":
    main()

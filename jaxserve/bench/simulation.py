"""An engine's configuration in virtual time: the scheduler it would have, on a modelled device.

Knows which limits an engine takes from its configuration.  Imports no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from jaxserve import policies
from jaxserve.bench.throughput import read_workload
from jaxserve.config import EngineConfig, load_profile
from jaxserve.shapes import ShapeSet, shape_set
from scheduler import Scheduler
from scheduler.simulation import Simulation
from scheduler.simulator import VirtualClock, simulate
from scheduler.step_time import (
    Buckets,
    ChipSpec,
    FittedCost,
    ModelSpec,
    Roofline,
    StepCost,
)
from scheduler.summary import Bounds
from scheduler.trace import Arrival, Arrivals

PAGE_SIZE = 16
MAX_MODEL_LEN = 4096
"""Where neither the configuration nor a model says."""
KV_BYTES = {"auto": 2.0, "bfloat16": 2.0, "int8": 1.0, "fp8": 1.0}
_SCALE_BYTES = 4.0
"""Of a token and head, where the cache has 8 bits."""


def simulate_config(
    config: EngineConfig,
    arrivals: Arrivals | Iterable[Arrival],
    cost: StepCost,
    *,
    host_s: float = 0.0,
    bounds: Bounds | None = None,
    record_slots: bool = True,
) -> Simulation:
    """Serve a trace as an engine of this configuration would.

    Args:
        config: sizes and policies; what it leaves open is chosen by `completed`.
        arrivals: the trace.
        cost: how long the device takes for a plan.
        host_s: seconds of the host for each turn, beside waiting for the device.
        bounds: what a request must keep to count as served well.
        record_slots: keep who held which slot in each step.

    Raises:
        ValueError: the configuration cannot be, or a request can never run.
    """
    config = completed(config, cost)
    clock = VirtualClock()
    buckets = step_buckets(config, cost)
    scheduler = make_scheduler(config, buckets, clock, cost)
    return simulate(
        scheduler,
        arrivals,
        cost,
        clock=clock,
        asynchronous=config.async_scheduling,
        host_s=host_s,
        buckets=buckets,
        bounds=bounds,
        record_slots=record_slots,
    )


def make_scheduler(
    config: EngineConfig, buckets: Buckets, clock: VirtualClock, cost: StepCost
) -> Scheduler:
    """The scheduler that an engine of this configuration has, in virtual time.

    Preempted sequences are computed anew: the device that is modelled copies no pages.

    Args:
        config: with nothing left open.
        buckets: the compiled sizes.
        clock: of the simulation.
        cost: what the latency bounds are kept by; an engine learns it, the simulator knows it.

    Raises:
        ValueError: the limits contradict each other.
    """
    shapes = ShapeSet(buckets.rows, buckets.chunks)
    config = replace(config, preemption="recompute")
    return policies.make_scheduler(config, shapes, clock=clock, cost=cost)


def completed(config: EngineConfig, cost: StepCost) -> EngineConfig:
    """The configuration with nothing left open.

    A roofline's pages are what the chip's memory has room for beside the weights.  A table of
    step times does not know a memory: there is a page for every token of every slot.

    Raises:
        ValueError: the weights do not fit the chip.
    """
    page_size = config.block_size or PAGE_SIZE
    longest = config.max_model_len or MAX_MODEL_LEN
    num_pages = config.num_kv_blocks
    if num_pages is None and isinstance(cost, Roofline):
        num_pages = cost.num_kv_tokens(config.memory_utilization) // page_size + 1
        longest = config.max_model_len or min(longest, (num_pages - 1) * page_size + 1)
    if num_pages is None:
        num_pages = config.max_num_seqs * -(-longest // page_size) + 1
    return replace(
        config,
        block_size=page_size,
        max_model_len=longest,
        num_kv_blocks=num_pages,
        multi_step=config.multi_step or 1,
    )


def step_buckets(config: EngineConfig, cost: StepCost) -> Buckets:
    """The compiled sizes: those that a table was measured with, or the configuration's."""
    shapes = shape_set(config, "gpu")
    own = Buckets(shapes.decode_rows, shapes.chunks)
    known = cost.buckets if isinstance(cost, FittedCost) else own
    return known if known.chunks and known.rows[-1] == own.rows[-1] else own


def workload_arrivals(path: str | Path, num_prompts: int | None = None) -> list[Arrival]:
    """The requests of a workload file, all at second 0 and to their full length.

    Raises:
        ValueError: it is not a workload file, or has prompts as text.
        OSError: it cannot be read.
    """
    arrivals = []
    for number, request in enumerate(read_workload(path, num_prompts)):
        if request.prompt_token_ids is None:
            raise ValueError(
                f"{str(path)!r}, request {number}: the simulator has no tokenizer; give "
                "prompt_token_ids"
            )
        ids = tuple(request.prompt_token_ids)
        arrivals.append(Arrival(0.0, len(ids), request.max_tokens, token_ids=ids))
    return arrivals


def make_roofline(
    chip: str,
    model: str,
    *,
    num_chips: int = 1,
    kv_cache_dtype: str = "auto",
    overhead_s: float = 0.0,
) -> Roofline:
    """The bound of a named chip and model, or of files like those in `configs/`.

    Args:
        chip: such as "a100", or a YAML file with the fields of `ChipSpec`.
        model: such as "7b", or a YAML file with the fields of `ModelSpec`.
        num_chips: chips that share the model.
        kv_cache_dtype: of the pages.
        overhead_s: seconds of each iteration beside the bound.

    Raises:
        ValueError: there is no such chip or model.
    """
    sizes = _read(ModelSpec, "models", model)
    bits8 = KV_BYTES[kv_cache_dtype] < KV_BYTES["auto"]
    element = KV_BYTES[kv_cache_dtype] + (_SCALE_BYTES / sizes.head_dim if bits8 else 0.0)
    return Roofline(
        _read(ChipSpec, "chips", chip),
        replace(sizes, kv_bytes_per_element=element),
        num_chips=num_chips,
        overhead_s=overhead_s,
    )


Spec = TypeVar("Spec", ChipSpec, ModelSpec)


def _read(kind: type[Spec], folder: str, name: str) -> Spec:
    path = _find(folder, name)
    values = load_profile(path)
    known = {field.name for field in fields(kind)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ValueError(
            f"{str(path)!r} has unknown keys {', '.join(unknown)}; known are "
            f"{', '.join(sorted(known))}"
        )
    try:
        return kind(**{key: _number(key, value) for key, value in values.items()})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r}: {error}") from error


def _number(key: str, value: Any) -> Any:
    if key == "name":
        return str(value)
    number = float(value)
    if not number > 0:
        raise ValueError(f"{key}={value} must be positive")
    return int(number) if number.is_integer() and "bytes" not in key else number


def _find(folder: str, name: str) -> Path:
    """A file of that name, else one that ships with jaxserve: in the wheel, or in a checkout."""
    if Path(name).suffix == ".yaml":
        return Path(name)
    package = Path(__file__).parents[1]
    folders = [parent / "configs" / folder for parent in (package, package.parent)]
    for shipped in folders:
        path = shipped / f"{name.lower()}.yaml"
        if path.is_file():
            return path
    names = sorted({path.stem for shipped in folders for path in shipped.glob("*.yaml")})
    raise ValueError(f"there is no {name!r} in {folder}; known are {', '.join(names)}, or a .yaml")

"""What a step costs the host: the real engine and scheduler over a device that computes nothing.

The device takes a fixed time per step, so that whatever else passes is the host's.  The cost of
starting a program is measured apart, with the arguments of a real step.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxserve import sharding
from jaxserve.batch import SAMPLES
from jaxserve.carry import CarrySizes
from jaxserve.drive import run_all
from jaxserve.engine import Engine
from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.models.llama import abstract_params
from jaxserve.report import RAN, SAMPLED, StepOutput, unpack_report
from jaxserve.runner import Runner, Ticket
from jaxserve.sampling_params import SamplingParams
from jaxserve.shapes import ShapeSet, StepShape
from jaxserve.spec import StepSpec
from jaxserve.tokenizer import Tokenizer
from pallas_kernels import KVLayout, Tuned
from scheduler import BlockPool, Scheduler, SchedulerConfig

SMOLLM2 = ModelConfig(
    architecture="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position=2048,
    rms_eps=1e-5,
    rope=RopeConfig(),
    tie_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    sliding_windows=(None,) * 30,
    eos_token_ids=(),
    bos_token_id=None,
)
"""The demo model's sizes."""
PAGE_SIZE = 64
MAX_MODEL_LEN = 2048
CHUNK = 512
NUM_TOP = 20
PHASES = ("schedule", "pack", "update", "output")
"""Of `EngineStats.host_s_by_phase`, those that a step on any device has; the rest is "other"."""


@dataclass(frozen=True)
class _Flight:
    """A dispatch on the device: what it was given, and when it will be done."""

    packed: npt.NDArray[np.int32]
    shape: StepShape
    done_s: float


class FixedTimeRunner(Runner):
    """A device that takes a fixed time per step, one dispatch after the other.

    Its tokens are a function of slot and position, and made up while the host waits for them.  It
    knows exactly how long it had nothing to do.
    """

    def __init__(self, spec: StepSpec, shapes: ShapeSet, step_s: float) -> None:
        """Nothing is compiled or allocated.

        Args:
            spec: static sizes.
            shapes: the closed set.
            step_s: seconds of each step.
        """
        self.spec = spec
        self.shapes = shapes
        self.masked_steps = "off"
        self.busy_s = 0.0
        self.idle_s = 0.0
        self._step_s = step_s
        self._done_s: float | None = None

    def set_slot(self, packed: npt.NDArray[np.int32]) -> None:
        """Costs no time."""

    def run(self, packed: npt.NDArray[np.int32], shape: StepShape) -> Ticket:
        """Begin when the dispatch before is done, or now."""
        now = time.perf_counter()
        before = now if self._done_s is None else self._done_s
        duration = int(packed[0]) * self._step_s
        self.idle_s += max(now - before, 0.0)
        self.busy_s += duration
        self._done_s = max(now, before) + duration
        flight: Any = _Flight(packed, shape, self._done_s)
        return Ticket(flight, flight)

    def read(self, ticket: Ticket) -> StepOutput:
        """Make up the report, then wait until the dispatch is done."""
        flight: Any = ticket.out
        report = self._report(flight.packed, flight.shape)
        time.sleep(max(flight.done_s - time.perf_counter(), 0.0))
        return report

    def _report(self, packed: npt.NDArray[np.int32], shape: StepShape) -> StepOutput:
        layout = self.spec.batch_layout(shape)
        num_steps, _, slot, start, length, flags = layout.views(packed)[:6]
        step = np.arange(layout.max_steps)[:, None]
        ran = step < num_steps
        samples = ran & (flags & SAMPLES != 0) & (length > step)
        out = np.zeros((layout.max_steps, shape.rows, self.spec.out_width), np.int32)
        out[..., 0] = (31 * slot + 7 * (start + step)) % 256
        out[..., 1] = RAN * ran + SAMPLED * samples
        return unpack_report(out, self.spec.num_top)


def make_engine(
    num_slots: int, step_s: float, multi_step: int, *, asynchronous: bool = True
) -> tuple[Engine, FixedTimeRunner]:
    """An engine with the demo model's sizes on a device of fixed step time."""
    dtype = np.dtype(ml_dtypes.bfloat16)
    tuned = Tuned(block_q=1, block_kv=64, chunk_kv=256)
    spec = StepSpec(
        model=SMOLLM2,
        layout=KVLayout(dtype, SMOLLM2.num_kv_heads, SMOLLM2.head_dim, PAGE_SIZE, "cpu"),
        sizes=CarrySizes(
            num_slots=num_slots,
            vocab_size=SMOLLM2.vocab_size,
            pages_per_seq=MAX_MODEL_LEN // PAGE_SIZE,
            max_model_len=MAX_MODEL_LEN,
        ),
        num_top=NUM_TOP,
        decode=tuned,
        prefill=tuned,
        attention="none",
        max_steps=multi_step,
    )
    runner = FixedTimeRunner(spec, ShapeSet((num_slots,), (CHUNK,)), step_s)
    limits = SchedulerConfig(
        max_num_seqs=num_slots,
        token_budget=num_slots + CHUNK,
        max_prefill_tokens=CHUNK,
        max_model_len=MAX_MODEL_LEN,
        multi_step=multi_step,
    )
    pool = BlockPool(1 + num_slots * MAX_MODEL_LEN // PAGE_SIZE, PAGE_SIZE)
    engine = Engine(
        runner,
        Scheduler(limits, pool),
        Tokenizer.of_bytes(),
        end_ids=frozenset({257}),
        seed=0,
        asynchronous=asynchronous,
    )
    return engine, runner


def steady(num_slots: int, num_turns: int, step_s: float, multi_step: int) -> dict[str, Any]:
    """Decode with every slot in use, nothing coming or going.

    Returns:
        Medians over the turns of the engine's loop, in seconds per turn: `PHASES`, other, and
        total; dispatch is left out, as this device has none.
    """
    engine, _ = make_engine(num_slots, step_s, multi_step)
    longest = MAX_MODEL_LEN - PAGE_SIZE
    num_turns = min(num_turns, longest // multi_step - num_slots // PAGE_SIZE - 4)
    ask = SamplingParams(temperature=0, max_tokens=longest)
    for slot in range(num_slots):
        engine.submit([slot % 256] * 8, ask)
    while engine.scheduler.num_waiting or not all(s.in_decode for s in engine.scheduler.running):
        engine.step()
    for _ in range(2):  # what is in flight was not planned in a steady state
        engine.step()
    turns = [_turn(engine) for _ in range(num_turns)]
    phases = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    return {
        "slots": num_slots,
        "turns": num_turns,
        "steps_per_turn": sum(turn["steps"] for turn in turns) / num_turns,
        **{f"{name}_s": phases[name] for name in (*PHASES, "other")},
        "total_s": sum(phases[name] for name in (*PHASES, "other")),
    }


def _turn(engine: Engine) -> dict[str, float]:
    """Seconds of one turn of the loop by phase, and its device steps."""
    engine.reset_stats()
    engine.step()
    stats = engine.stats()
    by_phase = dict(stats.host_s_by_phase)
    by_phase.pop("dispatch", None)
    named = {name: by_phase.pop(name, 0.0) for name in PHASES}
    return {**named, "other": sum(by_phase.values()), "steps": stats.steps}


def ragged(
    num_requests: int, num_slots: int, step_s: float, multi_step: int, *, asynchronous: bool = True
) -> dict[str, Any]:
    """Requests of many lengths, all submitted at once: how long the device waits for the host.

    Returns:
        Counts, seconds, and `idle_share`, the device's idle time over the whole.
    """
    engine, runner = make_engine(num_slots, step_s, multi_step, asynchronous=asynchronous)
    rng = random.Random(0)
    for _ in range(num_requests):
        ask = SamplingParams(temperature=0, max_tokens=rng.randint(8, 180))
        engine.submit([rng.randrange(256) for _ in range(rng.randint(20, 250))], ask)
    outputs = list(run_all(engine))
    stats = engine.stats()
    return {
        "requests": len(outputs),
        "slots": num_slots,
        "output_tokens": stats.output_tokens,
        "steps": stats.steps,
        "dispatches": stats.dispatches,
        "busy_s": runner.busy_s,
        "idle_s": runner.idle_s,
        "idle_share": runner.idle_s / (runner.busy_s + runner.idle_s),
    }


def dispatch(
    num_slots: int, num_calls: int, model: ModelConfig = SMOLLM2, num_pages: int = 8
) -> dict[str, Any]:
    """What it costs to start a program with the arguments of a step and hardly any work.

    Returns:
        The number of arrays that go in and come out, and medians in seconds: `call_s` until the
        call returns, with the batch as an array of the host, and `thread_s`, the processor time
        of that; `put_s`, what a transfer of the batch by itself would cost.
    """
    engine, _ = make_engine(num_slots, 0.0, 1)
    spec = engine.runner.spec
    placed = sharding.replicated(sharding.make_mesh(jax.default_backend(), 1))

    def zeros(like: Any) -> jax.Array:
        return jnp.zeros(like.shape, like.dtype, device=placed)

    params = jax.tree.map(zeros, abstract_params(model, np.dtype(ml_dtypes.bfloat16)))
    pages = tuple(spec.layout.abstract(num_pages) for _ in range(model.num_layers))
    cache, carry = jax.tree.map(zeros, (pages, spec.sizes.abstract()))
    packed = spec.batch_layout(engine.runner.shapes.choose(num_slots, 0)).empty()

    def touch(params: Any, state: Any, packed: jax.Array) -> tuple[Any, jax.Array]:
        def one(x: jax.Array) -> jax.Array:
            return x.at[(0,) * x.ndim].set(packed[0].astype(x.dtype))

        return jax.tree.map(one, state), packed + 1

    jitted = jax.jit(touch, donate_argnums=1, keep_unused=True, out_shardings=placed)
    state = (cache, carry)
    call = jitted.lower(params, state, jax.ShapeDtypeStruct(packed.shape, packed.dtype)).compile()
    times = []
    for _ in range(num_calls + 3):
        start, work = time.perf_counter(), time.thread_time()
        state, out = call(params, state, packed)
        work, elapsed = time.thread_time() - work, time.perf_counter() - start
        out.block_until_ready()
        start = time.perf_counter()
        put = jax.device_put(packed, placed)
        times.append((elapsed, work, time.perf_counter() - start))
        put.block_until_ready()
    call_s, thread_s, put_s = (statistics.median(column) for column in zip(*times[3:], strict=True))
    return {
        "weights": len(jax.tree.leaves(params)),
        "donated": len(jax.tree.leaves(state)),
        "calls": num_calls,
        "call_s": call_s,
        "thread_s": thread_s,
        "put_s": put_s,
    }


def measure(
    slots: tuple[int, ...], num_turns: int, step_s: float, multi_step: int, num_requests: int
) -> dict[str, Any]:
    """Everything of this module, as plain data; times in seconds."""
    return {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "step_s": step_s,
        "multi_step": multi_step,
        "host": [steady(count, num_turns, step_s, multi_step) for count in slots],
        "ragged": ragged(num_requests, min(16, max(slots)), step_s, multi_step),
        "dispatch": dispatch(min(32, max(slots)), num_turns),
    }

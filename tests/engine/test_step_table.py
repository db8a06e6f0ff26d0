"""A table of step times from a running engine: what is recorded, and how it travels."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.bench.simulation import simulate_config
from jaxserve.bench.step_table import empty_table, read_table, recorded, written
from jaxserve.config import EngineConfig
from scheduler.step_time import StepWork
from scheduler.trace import Arrival
from tests.engine.mini import Mini, greedy, prompts, run

REQUESTS = [(prompt, greedy(20)) for prompt in prompts([5, 40, 90, 12])]


def test_every_dispatch_is_recorded(mini: Mini) -> None:
    engine = mini.engine(multi_step=8)
    own = engine.step_cost
    with recorded(engine, empty_table(engine)) as table:
        run(engine, REQUESTS)
    assert engine.step_cost is own
    assert table.num_records == engine.stats().dispatches
    run(engine, REQUESTS)
    assert table.num_records < engine.stats().dispatches
    assert table.buckets.rows == mini.runner.shapes.decode_rows
    assert table.buckets.chunks == mini.runner.shapes.chunks


def test_the_engine_has_its_own_again_after_an_error(mini: Mini) -> None:
    engine = mini.engine()
    own = engine.step_cost
    with pytest.raises(KeyError), recorded(engine, empty_table(engine)):
        raise KeyError
    assert engine.step_cost is own


def test_a_written_table_predicts(mini: Mini, tmp_path: Path) -> None:
    engine = mini.engine()
    with written(engine, tmp_path / "table.json"):
        run(engine, REQUESTS)
    table = read_table(tmp_path / "table.json")
    step_s = table.seconds(StepWork(rows=4, chunk_tokens=0, kv_tokens=200, num_seqs=4))
    assert step_s > 0
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, prefill_buckets=(16, 64))
    arrivals = [Arrival(0.0, len(prompt), 20) for prompt, _ in REQUESTS]
    report = simulate_config(config, arrivals, table).summary()
    assert report["output_tokens"] == 80
    assert report["wall_s"] > 19 * table.seconds(
        StepWork(rows=1, chunk_tokens=0, kv_tokens=1, num_seqs=1)
    )

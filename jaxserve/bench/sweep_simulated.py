"""The sweep without a device: the same load through the same scheduler in virtual time.

Knows the simulator.  A row has the names of a measured one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxserve.bench.load import Load
from jaxserve.bench.simulation import simulate_config
from jaxserve.bench.sweep import measure_load, with_slots
from jaxserve.config import EngineConfig
from scheduler.step_time import StepCost
from scheduler.summary import Bounds, cost_per_million_tokens

if TYPE_CHECKING:
    from jaxserve.llm import LLM


@dataclass(frozen=True, slots=True)
class Machine:
    """An engine as the simulator knows it."""

    config: EngineConfig
    cost: StepCost
    """How long its device takes for a plan."""

    @classmethod
    def measured(cls, llm: LLM, load: Load, *, ignore_eos: bool = False) -> Machine:
        """Serve a load and learn from it how long the steps of an engine take.

        Its tables are best for batches up to its own number of slots.

        Args:
            llm: its engine must be idle.
            load: long enough that steps of all kinds come.
            ignore_eos: generate all tokens asked for, whatever the model says.

        Raises:
            ValueError: a request does not fit the model.
        """
        from jaxserve.bench.step_table import empty_table, recorded

        with recorded(llm.engine, empty_table(llm.engine)) as cost:
            measure_load(llm, load, bounds=Bounds(), ignore_eos=ignore_eos)
        return cls(llm.config, cost)

    def row(
        self, load: Load, num_slots: int, *, bounds: Bounds, cost_per_hour: float | None = None
    ) -> dict[str, Any]:
        """The figures of a batch size.

        Raises:
            ValueError: a request can never run, or the token budget is below the batch size.
        """
        simulation = simulate_config(
            with_slots(self.config, num_slots),
            load.source(num_slots),
            self.cost,
            bounds=bounds,
            record_slots=False,
        )
        summary = simulation.summary()
        cost = cost_per_million_tokens(cost_per_hour, summary["output_tokens_per_s"])
        return {"max_num_seqs": num_slots, **summary, "cost_per_million_tokens": cost}

"""Options that say which machine the simulator is to be: a chip, a table, or the one at hand.

`bench sweep` and `tune` share them.
"""

from __future__ import annotations

import functools
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import click

from jaxserve.cli.base import Decorated, SectionOption
from jaxserve.cli.load import LoadOptions
from jaxserve.config import EngineConfig

if TYPE_CHECKING:
    from jaxserve.bench.load import Load
    from jaxserve.bench.sweep_simulated import Machine

_VOCAB_SIZE = 32_000
"""Of random requests where there is no model; the simulator only compares tokens."""


@dataclass(frozen=True, slots=True)
class MachineOptions:
    """The flags."""

    simulate: bool
    chip: str | None
    chip_model: str
    step_table: str | None

    def __post_init__(self) -> None:
        if self.chip is not None and self.step_table is not None:
            raise click.UsageError("Give one of --chip and --step-table.")
        if not self.simulate and (self.chip or self.step_table):
            raise click.UsageError("--chip and --step-table need --simulate.")

    @property
    def words(self) -> str:
        """Whose times they are, in a few words."""
        if self.chip is not None:
            return f"roofline of {self.chip_model} on {self.chip}"
        return f"step times of {self.step_table}" if self.step_table else "this engine's step times"

    def machine(
        self, options: LoadOptions, config: EngineConfig, most_slots: int
    ) -> tuple[Machine, Load]:
        """The machine and its load; without a chip or a table an engine is measured first.

        Args:
            options: what is asked.
            config: of the engine.
            most_slots: of the engine to measure.

        Raises:
            ValueError: a chip, model, table or workload cannot be read.
        """
        from jaxserve.bench.simulation import make_roofline
        from jaxserve.bench.step_table import read_table
        from jaxserve.bench.sweep_simulated import Machine

        if self.chip is None and self.step_table is None:
            return measured_machine(options, config, most_slots)
        if self.step_table is not None:
            return Machine(config, read_table(self.step_table)), options.load(_VOCAB_SIZE, None)
        assert self.chip is not None
        roofline = make_roofline(
            self.chip,
            self.chip_model,
            num_chips=config.tensor_parallel_size,
            kv_cache_dtype=config.kv_cache_dtype,
        )
        return Machine(config, roofline), options.load(_VOCAB_SIZE, None)


def measured_machine(
    options: LoadOptions, config: EngineConfig, num_slots: int
) -> tuple[Machine, Load]:
    """An engine that has just been measured, and the load that it served."""
    from jaxserve.bench.sweep import with_slots
    from jaxserve.bench.sweep_simulated import Machine
    from jaxserve.llm import LLM

    with closing(LLM(config=with_slots(config, num_slots))) as llm:
        load = options.load(llm.model_config.vocab_size, llm.tokenizer.encode)
        return Machine.measured(llm, load, ignore_eos=options.is_synthetic), load


def machine_options(function: Decorated) -> Decorated:
    """Add `--simulate` and what it takes; the verb gets one `machine_options`."""

    @functools.wraps(function)
    def verb(**kwargs: Any) -> Any:
        values = {name: kwargs.pop(name) for name in MachineOptions.__slots__}
        return function(machine_options=MachineOptions(**values), **kwargs)

    def option(*flags: str, **settings: Any) -> Any:
        return click.option(*flags, cls=SectionOption, section="Simulator options", **settings)

    for add in (
        option(
            "--step-table",
            metavar="FILE",
            help="Step times that `bench throughput --step-table` measured.",
        ),
        option("--chip-model", default="7b", help="Sizes of a model in configs/models, or a file."),
        option("--chip", help="Roofline of a chip in configs/chips, or a YAML file."),
        option(
            "--simulate",
            is_flag=True,
            help="Virtual time instead of runs: of a chip, of a table of step times, or of the "
            "steps that an engine with the most slots has just run.",
        ),
    ):
        verb = add(verb)
    return cast(Decorated, verb)

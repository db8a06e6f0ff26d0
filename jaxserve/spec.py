"""Everything static about an engine's steps: what their executables are made from."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.batch import BatchLayout
from jaxserve.carry import CarrySizes
from jaxserve.models.config import ModelConfig
from jaxserve.report import report_width
from jaxserve.shapes import StepShape
from pallas_kernels import KVLayout, KVPages, Tuned

TENSOR_AXIS = "tensor"
"""Mesh axis over which the KV heads of each layer are split."""

Cache = tuple[KVPages, ...]
"""The pages of each layer, laid out by `KVLayout`."""


@dataclass(frozen=True)
class StepSpec:
    """Model, sizes and the choices made at start-up."""

    model: ModelConfig
    layout: KVLayout
    sizes: CarrySizes
    num_top: int
    """Entries of every report of top log-probabilities."""
    decode: Tuned
    """Sizes of the attention of decode rows."""
    prefill: Tuned
    """Sizes of the attention of chunk rows."""
    attention: str
    """Attention implementation, a name of `pallas_kernels.implementations`."""
    max_steps: int = 1
    """Most decode steps of one dispatch."""
    asks: str | None = None
    """Instruction set of the CPU kernels through which a step asks the host for the masks of
    constraints; None where steps do not ask."""

    def batch_layout(self, shape: StepShape) -> BatchLayout:
        """Layout of the packed batch of a shape."""
        max_steps = 1 if shape.chunk else self.max_steps
        return BatchLayout(shape, self.sizes.num_slots, self.layout.page_size, max_steps)

    @property
    def out_width(self) -> int:
        """Columns of a step's packed report."""
        return report_width(self.num_top)

"""Every program that an engine runs, ready to be compiled: the closed set, by name.

Knows the shapes, types and places of all arguments and results.  Does not run anything and holds
no array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered

from jaxserve import sharding
from jaxserve.carry import Carry, set_slot
from jaxserve.executables import Program
from jaxserve.shapes import ShapeSet, StepShape
from jaxserve.spec import TENSOR_AXIS, Cache, StepSpec
from jaxserve.step import build_forward, build_sample, build_step, prompt_logprobs
from jaxserve.swap import Pages, SwapSizes, put, take
from pallas_kernels import KVPages

SET_SLOT, TAKE_PAGES, PUT_PAGES = "set-slot", "take-pages", "put-pages"
SAMPLE = "sample"
"""The second half of a step, whatever its chunk."""


def step_name(shape: StepShape) -> str:
    """Name of a whole step."""
    return f"step-{shape}"


def forward_name(shape: StepShape) -> str:
    """Name of the first half of a step."""
    return f"forward-{shape}"


def score_name(chunk: int) -> str:
    """Name of the prompt log-probabilities of so many chunk rows."""
    return f"prompt-logprobs-{chunk}"


@dataclass(frozen=True)
class Programs:
    """The programs of one engine."""

    spec: StepSpec
    shapes: ShapeSet
    mesh: Mesh
    params: Any
    """Shapes, types and places of the weights as they are served."""
    num_pages: int
    swap: SwapSizes
    """Host memory for pages."""
    split: bool
    """Whether steps exist in two halves too."""

    def all(self) -> list[Program]:
        """Every program; what a first request needs comes first."""
        steps = {shape: self._step(shape) for shape in self.shapes.all()}
        scores = [self._score(chunk) for chunk in self.shapes.chunks]
        copies = self._copies() if self.swap.num_pages > 0 else []
        halves = self._halves() if self.split else []
        needed = steps[self.shapes.choose(1, 1)], steps[self.shapes.choose(1, 0)]
        first = [self._set_slot(), *needed]
        others = [p for p in (*steps.values(), *scores, *copies, *halves) if p not in first]
        return [*first, *others]

    @property
    def placed(self) -> jax.sharding.NamedSharding:
        """Where everything but weights and pages lies."""
        return sharding.replicated(self.mesh)

    @property
    def paged(self) -> jax.sharding.NamedSharding:
        """Where pages lie."""
        partition = self.spec.layout.partition_spec(TENSOR_AXIS)
        placed: jax.sharding.NamedSharding = sharding.placed(self.mesh, partition)
        return placed

    def cache(self) -> Cache:
        """Shapes of the pages of each layer."""
        return (self._pages(),) * self.spec.model.num_layers

    def group(self) -> Pages:
        """Shapes of the pages of each layer that travel together."""
        pages: KVPages = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self.swap.group, *x.shape[1:]), x.dtype, sharding=x.sharding
            ),
            self._pages(),
        )
        return (pages,) * self.spec.model.num_layers

    def carry(self) -> Carry:
        """Shapes of the slots' state."""
        like = self.spec.sizes.abstract()
        return Carry(*(self._array(x.shape, x.dtype) for x in like))  # type: ignore[arg-type]

    def _step(self, shape: StepShape) -> Program:
        packed = self._packed(shape)
        cache = self.cache()
        return self._program(
            step_name(shape),
            self._of_leaves(build_step(self.spec, shape, self.mesh)),
            (self._leaves, cache, self.carry(), packed),
            results=(cache, self.carry(), packed, packed),
            placed=(self._in_pages(cache), self.placed, self.placed, self.placed),
            donate=(1, 2),
        )

    def _halves(self) -> list[Program]:
        forwards = [self._forward(shape) for shape in self.shapes.split()]
        return [*forwards, self._sample()]

    def _forward(self, shape: StepShape) -> Program:
        packed, cache = self._packed(shape), self.cache()
        return self._program(
            forward_name(shape),
            self._of_leaves(build_forward(self.spec, shape, self.mesh)),
            (self._leaves, cache, self.carry(), packed),
            results=(cache, self.carry(), packed, packed),
            placed=(self._in_pages(cache), self.placed, self.placed, self.placed),
            donate=(1, 2),
        )

    def _sample(self) -> Program:
        spec, rows = self.spec, self.shapes.max_rows
        hidden = self._array((rows, spec.model.hidden_size), jnp.float32)
        packed = self._array((spec.batch_layout(StepShape(rows, 0)).num_row_numbers,), jnp.int32)
        masks = self._array((spec.sizes.num_slots, spec.sizes.allowed_words), jnp.int32)
        return self._program(
            SAMPLE,
            self._of_leaves(build_sample(spec, rows)),
            (self._leaves, self.carry(), hidden, packed, masks),
            results=(self.carry(), packed),
            placed=(self.placed, self.placed),
            donate=(1,),
        )

    def _score(self, chunk: int) -> Program:
        hidden = self._array((chunk, self.spec.model.hidden_size), jnp.float32)
        targets = self._array((chunk,), jnp.int32)
        return self._program(
            score_name(chunk),
            self._of_leaves(partial(prompt_logprobs, self.spec)),
            (self._leaves, hidden, targets),
            results=targets,
            placed=self.placed,
        )

    def _set_slot(self) -> Program:
        sizes = self.spec.sizes
        packed = self._array((sizes.packed_size,), jnp.int32)
        return self._program(
            SET_SLOT,
            partial(set_slot, sizes=sizes),
            (self.carry(), packed),
            results=self.carry(),
            placed=self.placed,
            donate=(0,),
        )

    def _copies(self) -> list[Program]:
        layout, group, cache = self.spec.layout, self.group(), self.cache()
        numbers = self._array((self.swap.group,), jnp.int32)
        placed = self._in_pages(cache)
        out = self._program(
            TAKE_PAGES, partial(take, layout), (cache, numbers), results=group, placed=placed
        )
        back = self._program(
            PUT_PAGES,
            partial(put, layout),
            (cache, numbers, group),
            results=cache,
            placed=placed,
            donate=(0,),
        )
        return [out, back]

    def _program(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        results: Any,
        placed: Any,
        donate: tuple[int, ...] = (),
    ) -> Program:
        def lower() -> Lowered:
            jitted = jax.jit(function, donate_argnums=donate, out_shardings=placed)
            return jitted.lower(*arguments)

        return Program(name=name, lower=lower, arguments=arguments, results=results)

    @property
    def _leaves(self) -> list[Any]:
        """The weights as the programs take them: one by one, in the order of their tree.

        Comparing trees of packed weights takes a call longer than all else that it does.
        """
        return jax.tree.leaves(self.params)

    def _of_leaves(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a tree of weights as one of its leaves."""
        tree = jax.tree.structure(self.params)

        def of_leaves(leaves: list[jax.Array], *rest: Any) -> Any:
            return function(jax.tree.unflatten(tree, leaves), *rest)

        return of_leaves

    def _array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=self.placed)

    def _packed(self, shape: StepShape) -> jax.ShapeDtypeStruct:
        return self._array((self.spec.batch_layout(shape).packed_size,), jnp.int32)

    def _in_pages(self, cache: Cache) -> tuple[Any, ...]:
        return tuple(self.paged for _ in cache)

    def _pages(self) -> KVPages:
        like = self.spec.layout.abstract(self.num_pages)
        pages: KVPages = jax.tree.map(
            lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
            like,
            self.paged,
        )
        return pages

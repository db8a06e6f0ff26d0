"""Owns the device: weights, cache, carry and the closed set of executables.

The runner is told what to do in packed arrays and answers with tickets; it knows no requests and
no policy.  It calls only ahead-of-time compiled objects, so an array of any other shape raises
and cannot compile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from jaxserve import sharding
from jaxserve.carry import Carry, set_slot
from jaxserve.executables import ExecutableStore, Program
from jaxserve.host_memory import zeros
from jaxserve.loading.canonical import leaves
from jaxserve.models.llama import Params
from jaxserve.report import StepOutput, unpack_report
from jaxserve.shapes import ShapeSet, StepShape
from jaxserve.spec import TENSOR_AXIS, Cache, StepSpec
from jaxserve.step import build_step, prompt_logprobs
from jaxserve.swap import NO_SWAP, HostPages, Pages, SwapSizes, groups, put, take
from jaxserve.weights import CANONICAL, WeightLayout, canonical, serve
from pallas_kernels import NULL_PAGE, KVPages
from scheduler import PageCopy

Loading = Future[Compiled]
"""An executable that may still be on its way from the disk."""


class Ticket(NamedTuple):
    """A dispatched step, running or done."""

    out: jax.Array
    """Its packed report."""
    chunk_hidden: jax.Array
    """Hidden rows of its chunk, kept on the device."""


class Runner:
    """Runs steps of any shape of the set, in the order of the calls."""

    def __init__(
        self,
        spec: StepSpec,
        shapes: ShapeSet,
        mesh: Mesh,
        params: Params,
        num_pages: int,
        store: ExecutableStore,
        weights: WeightLayout = CANONICAL,
        swap: SwapSizes = NO_SWAP,
    ) -> None:
        """Load or compile every executable, then allocate cache and carry.

        Args:
            spec: static sizes.
            shapes: the closed set.
            mesh: devices; arrays of `params` lie on it as `sharding.of_weight` says.
            params: the weights as `weights` lays them out.
            num_pages: pages of each layer's cache, the null page included.
            store: where executables are kept.
            weights: the layout in which weights are served.
            swap: host memory for pages.
        """
        self.spec = spec
        self.shapes = shapes
        self.mesh = mesh
        self._everywhere = sharding.replicated(mesh)
        self._paged = sharding.placed(mesh, spec.layout.partition_spec(TENSOR_AXIS))
        self._num_pages = num_pages
        self._params = params
        self._weights = weights
        self._store = store
        self._swap = swap
        self._num_runs = self._num_read = 0
        self._host_pages = HostPages(swap.num_pages, self._abstract_group())
        loading = self._start()
        self._steps = {shape: loading[_step_name(shape)] for shape in shapes.all()}
        self._prompt_logprobs = {chunk: loading[_score_name(chunk)] for chunk in shapes.chunks}
        self._set_slot = loading["set-slot"]
        self._take_pages, self._put_pages = loading.get("take-pages"), loading.get("put-pages")
        self._cache: Cache = tuple(
            jax.tree.map(lambda x: zeros(x.shape, x.dtype, x.sharding), self._abstract_pages())
            for _ in range(spec.model.num_layers)
        )
        self._carry: Carry = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=self._everywhere), spec.sizes.abstract()
        )

    def warm_up(self) -> None:
        """Run every executable once on nothing.

        XLA's CPU backend prepares an executable on its first call, which takes longer than the
        call itself.
        """
        for shape in self.shapes.all():
            layout = self.spec.batch_layout(shape)
            ticket = self.run(layout.empty(), shape)
            if shape.chunk:
                nothing = np.zeros(shape.chunk, np.int32)
                self.read_prompt_logprobs(self.prompt_logprobs(ticket, nothing, shape))
            self.read(ticket)
        if self._swap.num_pages > 0:
            padding = PageCopy((NULL_PAGE,), (0,))
            self.swap_out(padding)
            self.swap_in(padding)

    def close(self) -> None:
        """Stop loading executables that have not been needed."""
        self._store.close()

    def set_slot(self, packed: npt.NDArray[np.int32]) -> None:
        """Replace one slot's state; see `SlotPacker.pack`."""
        self._carry = self._set_slot.result()(self._carry, packed)

    def swap_out(self, copy: PageCopy) -> None:
        """Start to copy pages to the host; they may be written again by what is called next."""
        assert self._take_pages is not None
        for group in groups(copy, self._swap.group):
            content = self._take_pages.result()(self._cache, group.numbers)
            self._host_pages.receive(content, group.host_pages, self._num_runs)

    def swap_in(self, copy: PageCopy) -> None:
        """Copy pages back that `swap_out` has copied to the host."""
        assert self._put_pages is not None
        for group in groups(copy, self._swap.group):
            content = self._host_pages.content(group.host_pages, self._swap.group)
            self._cache = self._put_pages.result()(self._cache, group.numbers, content)

    def run(self, packed: npt.NDArray[np.int32], shape: StepShape) -> Ticket:
        """Start a step of the given shape and return at once.

        The caller never writes to `packed` again: it may be read until the step is done.
        """
        step = self._steps[shape].result()
        self._cache, self._carry, out, hidden = step(self._params, self._cache, self._carry, packed)
        out.copy_to_host_async()
        self._num_runs += 1
        return Ticket(out, hidden)

    def read(self, ticket: Ticket) -> StepOutput:
        """Wait for a step's report: the one device-to-host read of the step path."""
        report = unpack_report(np.asarray(ticket.out), self.spec.num_top)
        self._host_pages.settle(self._num_read)
        self._num_read += 1
        return report

    def prompt_logprobs(
        self, ticket: Ticket, targets: npt.NDArray[np.int32], shape: StepShape
    ) -> jax.Array:
        """Start scoring a step's chunk rows against the tokens that follow them."""
        score = self._prompt_logprobs[shape.chunk].result()
        out: jax.Array = score(self._params, ticket.chunk_hidden, targets)
        out.copy_to_host_async()
        return out

    def read_prompt_logprobs(self, out: jax.Array) -> StepOutput:
        """Wait for the report of `prompt_logprobs`."""
        return unpack_report(np.asarray(out), self.spec.num_top)

    @property
    def params(self) -> Params:
        """The canonical weights being served; unpacked into new arrays if they are packed."""
        if self._weights.is_canonical:
            return self._params
        return canonical(self._params, self._weights)

    def replace_params(self, params: Params) -> None:
        """Serve other canonical weights of the same shapes and types from the next step on.

        Raises:
            ValueError: a leaf is missing, unexpected or of another shape or type.
        """
        new = {
            tuple(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(params)
        }
        old = {leaf.path: leaf.shape for leaf in leaves(self.spec.model)}
        if new.keys() != old.keys():
            odd = sorted(map(_named, new.keys() ^ old.keys()))
            raise ValueError(f"the new weights differ in these leaves: {', '.join(odd[:8])}")
        for path, leaf in new.items():
            if (leaf.shape, leaf.dtype) != (old[path], self.dtype):
                raise ValueError(
                    f"new weight {_named(path)} is {leaf.dtype}{list(leaf.shape)}; "
                    f"the engine serves {self.dtype}{list(old[path])}"
                )
        served = params if self._weights.is_canonical else serve(params, self._weights)
        self._params = jax.tree.map(
            lambda leaf, like: jax.device_put(leaf, like.sharding), served, self._params
        )

    @property
    def num_host_pages(self) -> int:
        """Pages of the swap space."""
        return self._swap.num_pages

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the canonical weights and of the model's activations."""
        dtype: np.dtype[Any] = np.dtype(self._params["embed"].dtype)
        return dtype

    @property
    def weight_layout(self) -> str:
        """Name of the layout in which weights are served."""
        return self._weights.name

    def memory(self) -> dict[str, int]:
        """Bytes on the devices by part."""
        spec = self.spec
        pages = self._num_pages
        return {
            "weights_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self._params)),
            "kv_cache_bytes": spec.layout.page_bytes * pages * spec.model.num_layers,
            "slot_state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self._carry)),
        }

    def _start(self) -> dict[str, Loading]:
        """Every executable by name."""
        steps = {shape: self._step_program(shape) for shape in self.shapes.all()}
        scores = [self._score_program(chunk) for chunk in self.shapes.chunks]
        copies = self._copy_programs() if self._swap.num_pages > 0 else []
        # What a first request needs comes first.
        needed = steps[self.shapes.choose(1, 1)], steps[self.shapes.choose(1, 0)]
        first = [self._slot_program(), *needed]
        others = [p for p in (*steps.values(), *scores, *copies) if p not in first]
        return self._store.start([*first, *others])

    def _step_program(self, shape: StepShape) -> Program:
        spec = self.spec
        packed = self._abstract((spec.batch_layout(shape).packed_size,), jnp.int32)
        cache = (self._abstract_pages(),) * spec.model.num_layers
        arguments = (_abstract_of(self._params), cache, self._abstract_carry(), packed)
        return self._program(
            _step_name(shape),
            build_step(spec, shape, self.mesh),
            arguments,
            results=(cache, self._abstract_carry(), packed, packed),
            placed=(
                tuple(self._paged for _ in cache),
                self._everywhere,
                self._everywhere,
                self._everywhere,
            ),
            donate=(1, 2),
        )

    def _score_program(self, chunk: int) -> Program:
        hidden = self._abstract((chunk, self.spec.model.hidden_size), jnp.float32)
        targets = self._abstract((chunk,), jnp.int32)
        return self._program(
            _score_name(chunk),
            partial(prompt_logprobs, self.spec),
            (_abstract_of(self._params), hidden, targets),
            results=targets,
            placed=self._everywhere,
        )

    def _slot_program(self) -> Program:
        sizes = self.spec.sizes
        packed = self._abstract((sizes.packed_size,), jnp.int32)
        return self._program(
            "set-slot",
            partial(set_slot, sizes=sizes),
            (self._abstract_carry(), packed),
            results=self._abstract_carry(),
            placed=self._everywhere,
            donate=(0,),
        )

    def _copy_programs(self) -> list[Program]:
        layout, group = self.spec.layout, self._abstract_group()
        cache = (self._abstract_pages(),) * self.spec.model.num_layers
        numbers = self._abstract((self._swap.group,), jnp.int32)
        placed = tuple(self._paged for _ in cache)
        out = self._program(
            "take-pages", partial(take, layout), (cache, numbers), results=group, placed=placed
        )
        back = self._program(
            "put-pages",
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

    def _abstract(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=self._everywhere)

    def _abstract_pages(self) -> KVPages:
        like = self.spec.layout.abstract(self._num_pages)
        pages: KVPages = jax.tree.map(
            lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed),
            like,
            self._paged,
        )
        return pages

    def _abstract_group(self) -> Pages:
        """Pages of each layer that travel together."""
        pages: KVPages = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                (self._swap.group, *x.shape[1:]), x.dtype, sharding=x.sharding
            ),
            self._abstract_pages(),
        )
        return (pages,) * self.spec.model.num_layers

    def _abstract_carry(self) -> Carry:
        like = self.spec.sizes.abstract()
        return Carry(*(self._abstract(x.shape, x.dtype) for x in like))  # type: ignore[arg-type]


def _step_name(shape: StepShape) -> str:
    return f"step-{shape}"


def _score_name(chunk: int) -> str:
    return f"prompt-logprobs-{chunk}"


def _named(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _abstract_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

"""Owns the device: weights, cache, carry and the closed set of executables.

The runner is told what to do in packed arrays and answers with tickets; it knows no requests and
no policy.  It calls only ahead-of-time compiled objects, so an array of any other shape raises
and cannot compile.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh
from jax.stages import Compiled

from jaxserve.carry import Carry
from jaxserve.executables import ExecutableStore
from jaxserve.host_memory import zeros
from jaxserve.loading.canonical import leaves
from jaxserve.models.llama import Params
from jaxserve.programs import (
    PUT_PAGES,
    SAMPLE,
    SET_SLOT,
    TAKE_PAGES,
    Programs,
    forward_name,
    score_name,
    step_name,
)
from jaxserve.report import StepOutput, unpack_report
from jaxserve.shapes import ShapeSet, StepShape
from jaxserve.spec import Cache, StepSpec
from jaxserve.swap import NO_SWAP, HostPages, SwapSizes, groups
from jaxserve.weights import CANONICAL, WeightLayout, canonical, serve
from pallas_kernels import NULL_PAGE
from scheduler import PageCopy

Loading = Future[Compiled]
"""An executable that may still be on its way from the disk."""


class Ticket(NamedTuple):
    """A dispatched step, running or done."""

    out: jax.Array
    """Its packed report."""
    chunk_hidden: jax.Array
    """Hidden rows of its chunk, kept on the device."""


class Forwarded(NamedTuple):
    """The first half of a step, running or done; both arrays are kept on the device."""

    hidden: jax.Array
    """Hidden row of each sequence's last token."""
    chunk_hidden: jax.Array
    """Hidden rows of its chunk."""


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
        *,
        masked_steps: str = "off",
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
            masked_steps: how steps that constraints limit are run: "whole", "split" or "off".
        """
        self.spec = spec
        self.shapes = shapes
        self.mesh = mesh
        self._num_pages = num_pages
        self._hold(params)
        self._weights = weights
        self._store = store
        self._swap = swap
        self.masked_steps = masked_steps
        """How steps that constraints limit are run: "whole", "split" or not at all."""
        self._is_host = mesh.devices.flat[0].platform == "cpu"
        self._num_runs = self._num_read = 0
        programs = Programs(
            spec, shapes, mesh, _abstract_of(params), num_pages, swap, masked_steps == "split"
        )
        self._host_pages = HostPages(swap.num_pages, programs.group())
        loading = store.start(programs.all())
        self._steps = {shape: loading[step_name(shape)] for shape in shapes.all()}
        self._prompt_logprobs = {chunk: loading[score_name(chunk)] for chunk in shapes.chunks}
        split = shapes.split() if masked_steps == "split" else ()
        self._forwards = {shape: loading[forward_name(shape)] for shape in split}
        self._sample = loading.get(SAMPLE)
        self._set_slot = loading[SET_SLOT]
        self._take_pages, self._put_pages = loading.get(TAKE_PAGES), loading.get(PUT_PAGES)
        self._cache: Cache = jax.tree.map(
            lambda x: zeros(x.shape, x.dtype, x.sharding), programs.cache()
        )
        self._carry: Carry = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=programs.placed), spec.sizes.abstract()
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
        sizes = self.spec.sizes
        nothing = np.zeros((sizes.num_slots, sizes.allowed_words), np.int32)
        for shape in self._forwards:
            packed = self.spec.batch_layout(shape).empty()
            self.read(self.sample(self.forward(packed, shape), packed, nothing, shape))
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
        self._cache, self._carry, out, hidden = step(self._leaves, self._cache, self._carry, packed)
        self._fetch(out)
        self._num_runs += 1
        return Ticket(out, hidden)

    def forward(self, packed: npt.NDArray[np.int32], shape: StepShape) -> Forwarded:
        """Start the first half of a step, as `run` does the whole."""
        half = self._forwards[shape].result()
        self._cache, self._carry, hidden, chunk_hidden = half(
            self._leaves, self._cache, self._carry, packed
        )
        self._num_runs += 1
        return Forwarded(hidden, chunk_hidden)

    def sample(
        self,
        forwarded: Forwarded,
        packed: npt.NDArray[np.int32],
        masks: npt.NDArray[np.int32],
        shape: StepShape,
    ) -> Ticket:
        """Start the second half of a step; nothing may be run between the two.

        Args:
            forwarded: what the first half gave.
            packed: what it was given.
            masks: i32[slots, allowed_words], packed bits.
            shape: of the step.
        """
        assert self._sample is not None
        half = self._sample.result()
        rows = packed[: self.spec.batch_layout(shape).num_row_numbers]
        self._carry, out = half(self._leaves, self._carry, forwarded.hidden, rows, masks)
        self._fetch(out)
        return Ticket(out, forwarded.chunk_hidden)

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
        out: jax.Array = score(self._leaves, ticket.chunk_hidden, targets)
        self._fetch(out)
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
        placed = jax.tree.map(
            lambda leaf, like: jax.device_put(leaf, like.sharding), served, self._params
        )
        self._hold(placed)

    def _fetch(self, out: jax.Array) -> None:
        """Start to copy a report to the host, where a CPU's lies already."""
        if not self._is_host:
            out.copy_to_host_async()

    def _hold(self, params: Params) -> None:
        """Keep weights as they are served: the tree, and its leaves as the programs take them."""
        self._params, self._leaves = params, jax.tree.leaves(params)

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


def _named(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _abstract_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

"""The one place that names Pallas' Triton backend: loads, stores, products and launches.

Knows the backend's habits, and nothing of attention.  When JAX drops the backend, this file is
what changes.  Arrays inside a kernel have sizes that are powers of two, whence the masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.tuning import Launch

SMALLEST_PRODUCT = 16
"""Fewest rows, columns and summands of a product on tensor cores."""
_DEPRECATED = "The Pallas Triton backend is deprecated"


def load(ref: Any, index: tuple[Any, ...], mask: jax.Array) -> jax.Array:
    """Elements where `mask` holds; what stands elsewhere is undefined.

    Every axis is indexed by a scalar or an array: the interpreter takes no slice beside arrays.
    """
    return plt.load(ref.at[index], mask=mask)


def load_or_zero(ref: Any, index: tuple[Any, ...], mask: jax.Array) -> jax.Array:
    """Elements where `mask` holds, zeros elsewhere, whatever lies there.

    Not of eight-bit floats: the backend has no constant of their type.
    """
    return plt.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def store(ref: Any, index: tuple[Any, ...], values: jax.Array, mask: jax.Array) -> None:
    """Write elements where `mask` holds.

    The interpreter writes the old value back elsewhere, so that a masked index must be past the
    end, where it is dropped, or nobody else's.
    """
    plt.store(ref.at[index], values, mask=mask)


def product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """f32 sum of products over the last axis of `a` and `axis` of `b`; f32 is not cut to TF32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def call(
    body: Callable[..., None],
    operands: Sequence[Any],
    *,
    name: str,
    grid: tuple[int, ...],
    out: Sequence[jax.ShapeDtypeStruct],
    launch: Launch,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Run `body(*refs of operands, *refs of out)` once per point of the grid.

    Args:
        body: the kernel; operands may be pytrees, and None stands for one that is not there.
        operands: arrays.
        name: shown by profilers.
        grid: programs along each axis.
        out: shapes of the results, which are undefined where no program writes.
        launch: warps and pipeline stages.
        interpret: on the Pallas interpreter instead of Triton.
        aliases: from an operand's number, counted in leaves, to the result written over it.
    """
    flat, tree = jax.tree.flatten(tuple(operands))
    kernel = _Kernel(body, name, tree, grid, tuple(out), launch, tuple((aliases or {}).items()))
    return kernel(*flat, interpret=True) if interpret else _kernel_p.bind(*flat, kernel=kernel)


@dataclass(frozen=True)
class _Kernel:
    body: Callable[..., None]
    name: str
    tree: Any
    grid: tuple[int, ...]
    out: tuple[jax.ShapeDtypeStruct, ...]
    launch: Launch
    aliases: tuple[tuple[int, int], ...]

    def __call__(self, *flat: jax.Array, interpret: bool = False) -> list[jax.Array]:
        run = pl.pallas_call(
            self.body,
            grid=self.grid,
            out_shape=list(self.out),
            input_output_aliases=dict(self.aliases),
            compiler_params=plt.CompilerParams(
                num_warps=self.launch.num_warps, num_stages=self.launch.num_stages
            ),
            interpret=interpret,
            name=self.name,
        )
        return run(*jax.tree.unflatten(self.tree, flat))


# JAX 0.11 and later warn of the backend's end whenever they lower a kernel of it, which is long
# after this file has returned.  A primitive of our own puts us around that moment.
_kernel_p = Primitive("triton_kernel")
_kernel_p.multiple_results = True


@_kernel_p.def_abstract_eval
def _(*operands: Any, kernel: _Kernel) -> list[Any]:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in kernel.out]


def _lower(ctx: Any, *operands: Any, kernel: _Kernel) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_DEPRECATED, category=DeprecationWarning)
        return mlir.lower_fun(kernel, multiple_results=True)(ctx, *operands)


mlir.register_lowering(_kernel_p, _lower)

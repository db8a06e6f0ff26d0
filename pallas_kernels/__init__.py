"""Paged attention and KV-cache writes for JAX: useful to any JAX program, no engine inside.

Public names: `KVLayout`, `Plan`, `make_plan`, `ragged_paged_attention`, `kv_write`,
`implementations`, and the NumPy oracles in `pallas_kernels.reference`.
"""

from pallas_kernels.attention import kv_write, ragged_paged_attention
from pallas_kernels.layout import NULL_PAGE, KVLayout
from pallas_kernels.plan import Plan, items_bound, make_plan
from pallas_kernels.registry import choose, implementations

__all__ = [
    "NULL_PAGE",
    "KVLayout",
    "Plan",
    "choose",
    "implementations",
    "items_bound",
    "kv_write",
    "make_plan",
    "ragged_paged_attention",
]

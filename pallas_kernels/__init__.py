"""Paged attention and KV-cache writes for JAX: useful to any JAX program, no engine inside.

`ragged_paged_attention` reads the paged cache of a layer, `kv_write` writes it and `copy_pages`
copies within it; `KVLayout` says how it lies in memory and `make_plan` lists the work of a call.
The operations have several implementations, chosen by name or by platform; the oracles in
`pallas_kernels.reference` say in NumPy what they compute.
"""

from pallas_kernels.attention import copy_pages, kv_write, ragged_paged_attention
from pallas_kernels.layout import NULL_PAGE, KVLayout, KVPages
from pallas_kernels.plan import Plan, items_bound, make_plan, split_items_bound
from pallas_kernels.registry import (
    AttentionOptions,
    Fused,
    Implementation,
    Use,
    choose,
    compute_capability,
    cpu_name,
    implementations,
    select,
)
from pallas_kernels.tuning import Launch, Tuned

__all__ = [
    "NULL_PAGE",
    "AttentionOptions",
    "Fused",
    "Implementation",
    "KVLayout",
    "KVPages",
    "Launch",
    "Plan",
    "Tuned",
    "Use",
    "choose",
    "compute_capability",
    "copy_pages",
    "cpu_name",
    "implementations",
    "items_bound",
    "kv_write",
    "make_plan",
    "ragged_paged_attention",
    "select",
    "split_items_bound",
]

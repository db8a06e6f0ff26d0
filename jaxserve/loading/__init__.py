"""Loading: from a path to a model configuration, a parameter tree and a tokenizer."""

from jaxserve.files import cache_directory
from jaxserve.loading.arrays import weight_dtype
from jaxserve.loading.source import (
    ModelSource,
    load_config,
    load_params,
    load_tokenizer,
    origin,
    resolve,
)

__all__ = [
    "ModelSource",
    "cache_directory",
    "load_config",
    "load_params",
    "load_tokenizer",
    "origin",
    "resolve",
    "weight_dtype",
]

"""Rotary position embedding: frequencies and how a context extension changes them.

Knows the scaling rules and how Hugging Face configurations spell them.  Does not know where the
angles are applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Base frequency and scaling rule; fields a kind does not use keep their defaults."""

    kind: str = "default"
    """default | linear | llama3 | yarn."""
    theta: float = 10000.0
    """Base of the geometric series of wavelengths."""
    factor: float = 1.0
    """How many times longer the context is than the one first trained on."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / this are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / this are kept."""
    original_max_position: int = 0
    """llama3, yarn: the context first trained on, in tokens."""
    attention_factor: float = 1.0
    """yarn: factor on cos and sin (so its square scales the logits)."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this in the original context are kept."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched in full."""
    truncate: bool = True
    """yarn: whether the ramp's ends are rounded outwards to whole dimensions."""

    def inv_freq(self, head_dim: int) -> npt.NDArray[np.float64]:
        """Angle per token of each of the head_dim / 2 rotated pairs; see `inv_freq`."""
        return inv_freq(self, head_dim)

    @property
    def attention_scaling(self) -> float:
        """Factor on cos and sin; see `attention_scaling`."""
        return attention_scaling(self)


def attention_scaling(rope: RopeConfig) -> float:
    """Factor on cos and sin: `attention_factor` for yarn, 1 for the others."""
    return rope.attention_factor if rope.kind == "yarn" else 1.0


def inv_freq(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float64]:
    """Angle per token of each rotated pair, f64[head_dim / 2].

    Unscaled (RoFormer, arXiv:2104.09864): f_i = theta^(-2i / head_dim).  linear divides all by
    `factor` (arXiv:2306.15595); llama3 (arXiv:2407.21783) divides the long wavelengths only, with
    a linear blend between the two limits; yarn (arXiv:2309.00071) blends by the number of turns
    in the original context.
    """
    plain: npt.NDArray[np.float64] = rope.theta ** (
        -np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    )
    if rope.kind == "linear":
        return np.divide(plain, rope.factor)
    if rope.kind == "llama3":
        return _blend(plain, rope.factor, _llama3_kept(rope, plain))
    if rope.kind == "yarn":
        return _blend(plain, rope.factor, _yarn_kept(rope, head_dim))
    return plain


def _blend(
    plain: npt.NDArray[np.float64], factor: float, kept: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The share `kept` of each frequency as it was, the rest divided by the factor."""
    return plain * kept + plain / factor * (1 - kept)


def _llama3_kept(rope: RopeConfig, plain: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    turns = rope.original_max_position * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    return np.clip((turns - rope.low_freq_factor) / span, 0.0, 1.0)


def _yarn_kept(rope: RopeConfig, head_dim: int) -> npt.NDArray[np.float64]:
    def pair_that_turns(times: float) -> float:
        turns_at_pair_0 = rope.original_max_position / (2 * math.pi * times)
        return head_dim * math.log(turns_at_pair_0) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001  # a step instead of a ramp, never a division by zero
    return np.clip((low + span - np.arange(head_dim // 2)) / span, 0.0, 1.0)


def parse_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """Read `rope_theta` and `rope_scaling` (or the newer `rope_parameters`) of a HF config.

    Args:
        config: the whole config.json.
        max_position: the model's context, the default of the original one.

    Raises:
        ValueError: a scaling type that is not implemented, named, or one without its numbers.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling={scaling!r} must be a mapping or null")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise ValueError(
            "rope_parameters with one entry per layer type are not supported; all layers must "
            "share one rotary embedding"
        )
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KINDS:
        raise ValueError(
            f"rope scaling type {kind!r} is not supported; supported are {', '.join(KINDS)}"
        )
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
        raise ValueError("partial_rotary_factor is not supported; heads must be rotated whole")
    theta = _number(scaling, "rope_theta", config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=_number(scaling, "factor"))
    original = _number(
        {**scaling, **_only(config, "original_max_position_embeddings")},
        "original_max_position_embeddings",
        max_position,
    )
    if kind == "llama3":
        return _llama3(scaling, theta, int(original))
    return _yarn(scaling, theta, int(original), max_position)


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The `rope_theta` and `rope_scaling` entries of a HF config; inverse of `parse_rope`."""
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.kind == "yarn":
        scaling |= {
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _llama3(scaling: Mapping[str, Any], theta: float, original: int) -> RopeConfig:
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if high <= low:
        raise ValueError(
            f"rope_scaling has high_freq_factor={high}, not above low_freq_factor={low}"
        )
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=_number(scaling, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _yarn(scaling: Mapping[str, Any], theta: float, original: int, max_position: int) -> RopeConfig:
    factor = _number(scaling, "factor", max_position / original)
    return RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_max_position=original,
        attention_factor=_number(scaling, "attention_factor", _yarn_attention(scaling, factor)),
        beta_fast=_number(scaling, "beta_fast", 32.0),
        beta_slow=_number(scaling, "beta_slow", 1.0),
        truncate=bool(scaling.get("truncate", True)),
    )


def _yarn_attention(scaling: Mapping[str, Any], factor: float) -> float:
    """0.1 ln(factor) + 1 (YaRN, equation 22), or the ratio of two such where both are given."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(_number(scaling, "mscale")) / mscale(_number(scaling, "mscale_all_dim"))
    return mscale(1.0)


def _only(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: config[key]} if config.get(key) is not None else {}


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"rope scaling needs {key!r}, which config.json does not give")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"rope scaling has {key}={value!r}; it must be a positive number")
    return float(value)

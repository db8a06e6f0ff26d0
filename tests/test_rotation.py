"""The rotary angles the model computes, far into a scaled context (B53)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxserve.models.llama import Rotation
from jaxserve.models.rope import RopeConfig
from tests.engine.mini import CONFIG

LLAMA3 = RopeConfig(
    kind="llama3",
    theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


def test_far_positions_keep_their_angle() -> None:
    """Within what float32 angles allow: 9,000 radians are known to half a thousandth."""
    config = dataclasses.replace(CONFIG, head_dim=64, rope=LLAMA3, max_position=131072)
    positions = np.array([0, 1, 63, 8191, 8192, 9000])
    rotation = Rotation(config, jnp.asarray(positions, jnp.int32), np.dtype(np.float32))
    angles = positions[:, None] * LLAMA3.inv_freq(64)
    np.testing.assert_allclose(rotation.cos, np.cos(angles), atol=2e-3)
    np.testing.assert_allclose(rotation.sin, np.sin(angles), atol=2e-3)


def test_rotation_turns_a_pair_by_its_angle() -> None:
    config = dataclasses.replace(CONFIG, head_dim=4)
    rotation = Rotation(config, jnp.array([3], jnp.int32), np.dtype(np.float32))
    turned = np.asarray(rotation(jnp.array([[[1.0, 0.0, 0.0, 2.0]]])))[0, 0]
    slow = 3 / 100.0  # the second pair's frequency is 10000 ** -0.5
    want = [np.cos(3), -2 * np.sin(slow), np.sin(3), 2 * np.cos(slow)]
    np.testing.assert_allclose(turned, want, atol=1e-6)

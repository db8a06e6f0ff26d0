from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.models.rope import RopeConfig, attention_scaling, inv_freq, parse_rope

DIM = 64
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def plain(theta: float) -> list[float]:
    return [theta ** -(2 * i / DIM) for i in range(DIM // 2)]


def llama3_by_cases(frequency: float) -> float:
    """The three cases of Llama 3.1, one frequency at a time."""
    wavelength = 2 * math.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192 / 1:
        return frequency / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_default(scaling):
    rope = parse_rope({"rope_theta": 500000.0, "rope_scaling": scaling}, 4096)
    np.testing.assert_allclose(inv_freq(rope, DIM), plain(500000.0), rtol=1e-12)
    assert attention_scaling(rope) == 1


def test_theta_defaults_to_ten_thousand():
    assert parse_rope({}, 4096).theta == 10000


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear_divides_all(key):
    rope = parse_rope({"rope_scaling": {key: "linear", "factor": 4}}, 4096)
    np.testing.assert_allclose(inv_freq(rope, DIM) * 4, plain(10000.0), rtol=1e-12)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("newer", [False, True])
def test_llama3_has_three_ranges(key, newer):
    scaling = {key: "llama3", **LLAMA3}
    config = (
        {"rope_parameters": {**scaling, "rope_theta": 500000.0}}
        if newer
        else {"rope_scaling": scaling, "rope_theta": 500000.0}
    )
    got = inv_freq(parse_rope(config, 131072), DIM)
    want = [llama3_by_cases(f) for f in plain(500000.0)]
    np.testing.assert_allclose(got, want, rtol=1e-6)
    ratio = got / plain(500000.0)
    assert {1.0, 0.125} <= set(ratio.round(9))
    assert any(0.126 < r < 0.999 for r in ratio)


def test_yarn_blends_by_turns():
    rope = parse_rope(
        {
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 4096,
            },
        },
        16384,
    )

    def pair(turns: float) -> float:
        return DIM * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = math.floor(pair(32)), math.ceil(pair(1))
    for i, (got, f) in enumerate(zip(inv_freq(rope, DIM), plain(10000.0), strict=True)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert got == pytest.approx(f / 4 * ramp + f * (1 - ramp), rel=1e-6)
    assert attention_scaling(rope) == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_options():
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    rope = parse_rope({"rope_scaling": scaling}, 16384)
    want = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert attention_scaling(rope) == pytest.approx(want)
    given = parse_rope({"rope_scaling": {**scaling, "attention_factor": 1.5}}, 16384)
    assert attention_scaling(given) == 1.5


def test_yarn_with_a_ramp_of_no_width_keeps_up_to_its_end():
    rope = RopeConfig(
        kind="yarn",
        factor=2.0,
        original_max_position=4096,
        beta_fast=4.0,
        beta_slow=4.0,
        truncate=False,
    )
    ratio = inv_freq(rope, DIM) / plain(10000.0)
    assert sorted(set(ratio.round(9))) == [0.5, 1.0]
    assert (np.diff(ratio.round(9)) <= 0).all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "nonsense"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_types_are_refused_by_name(kind, key):
    with pytest.raises(ValueError, match=kind):
        parse_rope({"rope_scaling": {key: kind, "factor": 2.0}}, 64)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor='4'"),
        ({"rope_type": "linear", "factor": 0}, "factor=0"),
        ({"rope_type": "llama3", "factor": 8}, "low_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "per layer type"),
        ("linear", "mapping"),
    ],
)
def test_incomplete_scaling_is_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        parse_rope({"rope_scaling": scaling}, 4096)

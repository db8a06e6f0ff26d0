"""The Mosaic GPU decode kernels lower for real chips, with neither a chip nor the CUDA plug-in."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from tests.deviceless import gpu
from tests.kernels.mosaic.llama_8b import FORMS

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason=f"Mosaic GPU needs JAX 0.11, not {jax.__version__}"
)
CHIPS = pytest.mark.parametrize("target", [gpu.A100, gpu.H100, gpu.H200, gpu.B200], ids=str)


@CHIPS
@pytest.mark.parametrize("form", FORMS)
def test_decode_is_two_kernels(target: gpu.Target, form: str) -> None:
    with gpu.described(target):
        lowered = traced(form).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 2


@CHIPS
def test_chips_from_hopper_on_copy_by_tma(target: gpu.Target) -> None:
    with gpu.described(target):
        kernels = str(traced("plain").jaxpr)
    assert ("barrier_wait" in kernels) == (target.capability >= (9, 0))
    assert ("wait_gmem_to_smem" in kernels) == (target.capability < (9, 0))


def traced(form: str) -> Any:
    return jax.jit(FORMS[form]).trace(*FORMS[form].arguments())

"""The demo model in every form that an engine reads, made once from its one GGUF file.

All forms hold the same dequantised weights, rounded to 16 bits or, for int8, to blocks of 8.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.peers.environments import last_line
from jaxserve.files import new_directory
from jaxserve.loading.convert import convert

if TYPE_CHECKING:
    from gguf import GGUFReader, GGUFWriter

_OPENVINO_TYPES = {"bf16": "F16", "int8": "Q8_0"}
"""GGUF has bfloat16, but OpenVINO's reader does not; its 16-bit compute type is chosen on load."""
_FILE_TYPES = {"F16": 1, "Q8_0": 7}
_LEAST_8BIT_SHARE = 0.9
"""Of the weights' bytes; scales and norms are the rest."""


class NotPrepared(RuntimeError):
    """A model could not be made; one line says why."""


def prepare(model: str, gguf: Path, directory: Path, openvino_python: Path | None) -> Path:
    """The path of a prepared model, made if it is not there.

    Args:
        model: "gguf" (the file itself), "hf-bf16", "openvino-bf16" or "openvino-int8".
        gguf: the demo model.
        directory: of prepared models.
        openvino_python: interpreter that has OpenVINO, for its forms.

    Raises:
        NotPrepared: OpenVINO cannot read what we wrote, or not as the type we want.
    """
    if model == "gguf":
        return gguf
    target = directory / model
    if not target.is_dir():
        if model == "hf-bf16":
            convert(str(gguf), str(target), "hf", "bfloat16")
        else:
            assert openvino_python is not None
            _make_openvino(gguf, target, model.partition("-")[2], openvino_python)
    return target


def _make_openvino(gguf: Path, target: Path, weights: str, python: Path) -> None:
    with new_directory(target) as partial:
        file = partial / "model.gguf"
        requantize(gguf, file, _OPENVINO_TYPES[weights])
        done = subprocess.run(
            [str(python), "-m", "benchmarks.peers.workers.openvino_model", str(file)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise NotPrepared(last_line(done.stderr) or f"exit code {done.returncode}")
        counted = json.loads((partial / "weight_bytes.json").read_text(encoding="utf-8"))
        if weights == "int8" and (share := share_of_8bit(counted)) < _LEAST_8BIT_SHARE:
            raise NotPrepared(f"only {share:.0%} of the int8 model's weights have 8 bits")
        file.unlink()


def share_of_8bit(weight_bytes: dict[str, int]) -> float:
    """Share of the bytes that belong to 8-bit integers."""
    eight = sum(weight_bytes.get(name, 0) for name in ("u8", "i8"))
    return eight / max(1, sum(weight_bytes.values()))


def requantize(source: Path, target: Path, kind: str) -> None:
    """Copy a GGUF file with its matrices as F16 or Q8_0 and its vectors as F32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    _copy_fields(reader, writer)
    writer.add_file_type(_FILE_TYPES[kind])
    stored = GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_fields(reader: GGUFReader, writer: GGUFWriter) -> None:
    # The first two are written by the writer itself, the type of the file by the caller.
    made = ("GGUF.", "general.architecture", "general.file_type")
    for field in reader.fields.values():
        if not field.name.startswith(made):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)

"""Turns a GGUF file into OpenVINO's own form, and counts the bytes of its weights by type.

python -m benchmarks.peers.workers.openvino_model DIRECTORY/model.gguf
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path


def convert(gguf: Path) -> None:
    """Write openvino_model.xml and its companions beside the file."""
    import openvino_genai as genai

    genai.LLMPipeline(str(gguf.resolve()), "CPU", enable_save_ov_model=True)


def weight_bytes(model: Path) -> dict[str, int]:
    """Bytes of the constants of a model by element type, the small ones left out."""
    import openvino

    found: Counter[str] = Counter()
    for node in openvino.Core().read_model(model).get_ops():
        if node.get_type_name() == "Constant" and node.get_byte_size() > 1 << 12:
            found[node.get_element_type().get_type_name()] += node.get_byte_size()
    return dict(found)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    convert(file)
    counted = weight_bytes(file.with_name("openvino_model.xml"))
    file.with_name("weight_bytes.json").write_text(json.dumps(counted), encoding="utf-8")

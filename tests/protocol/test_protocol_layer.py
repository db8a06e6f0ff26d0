"""The protocol knows no HTTP, no engine and no device; see the layers in docs/architecture.md."""

import subprocess
import sys

from tests.test_layers import ROOT, files, imports

FOREIGN = ("jax", "jaxlib", "flax", "starlette", "uvicorn", "httpx", "llguidance", "scheduler")
FOREIGN_MODULES = ("jaxserve.engine", "jaxserve.async_llm", "jaxserve.server", "jaxserve.cli")


def test_it_imports_nothing_above_it():
    for path in files("jaxserve/protocol"):
        for name in imports(path):
            shown = f"{path.relative_to(ROOT)} imports {name}"
            assert name.split(".")[0] not in FOREIGN, shown
            assert not f"{name}.".startswith(tuple(f"{m}." for m in FOREIGN_MODULES)), shown


def test_a_plain_request_and_its_answer_need_no_transformers():
    program = """
import sys
from jaxserve.protocol import ChatCompletionRequest, convert_body
body = {"messages": [], "response_format": {"type": "json_object"}, "tool_choice": "auto"}
convert_body(body, ChatCompletionRequest).sampling_params()
print(sorted({"transformers", "jax", "llguidance"} & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"

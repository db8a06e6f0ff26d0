"""`scripts/gpu_check.py`: stages end in time, and the report says what was found or failed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.gpu_stages import kernel_cases, kernels, parent
from scripts.gpu_stages.report import failures, markdown


def check(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = parent.main(["--out", str(tmp_path), "--small", *arguments])
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    return code, report, (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_small_run_reports_each_stage(tmp_path: Path) -> None:
    code, report, text = check(tmp_path, "--only", "device", "--only", "kernels-xla")
    assert code == 0
    assert list(report["stages"]) == ["device", "kernels-xla"]
    assert report["stages"]["device"]["result"]["copy_bytes_per_s"] > 0
    found = report["stages"]["kernels-xla"]["result"]
    assert found["complete"]
    assert [row["passed"] for row in found["checks"]] == [True] * 3
    assert "3 of 3 configurations equal their oracle" in text


def test_a_stage_that_does_not_end_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [parent.Stage("golden", "golden", seconds=0.5)]
    monkeypatch.setattr(parent, "plan", lambda **_: [slow, [parent.Stage("device", "device")]])
    code, report, text = check(tmp_path)
    assert code == 1
    assert report["stages"]["golden"]["status"] == "ended after its 0 s"
    assert report["stages"]["golden"]["seconds"] < 10
    assert report["stages"]["device"]["status"] == "ok"
    assert "| golden | ended after its 0 s |" in text


def test_a_stage_that_fails_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = parent.Stage("kernels-none", "kernels", "none")
    monkeypatch.setattr(parent, "plan", lambda **_: [[broken]])
    code, report, _ = check(tmp_path)
    assert code == 1
    stage = report["stages"]["kernels-none"]
    assert stage["status"] == "failed with exit code 1"
    assert "KeyError: 'none'" in stage["log"][-1]


def test_no_stage_is_started_when_time_is_over(tmp_path: Path) -> None:
    code, report, _ = check(tmp_path, "--minutes", "0.001")
    assert code == 1
    assert {s["status"] for s in report["stages"].values()} == {"not started: out of time"}


def test_an_unknown_stage_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        check(tmp_path, "--only", "roofl")
    assert exit_.value.code == 2
    assert re.search(r"no stage roofl; there are .*\broofline\b", capsys.readouterr().err)


@pytest.mark.parametrize("full", [False, True])
def test_stages_have_modules_and_times_within_six_minutes(full: bool) -> None:
    groups = parent.plan(small=False, full=full)
    stages = [stage for group in groups for stage in group]
    assert len({stage.name for stage in stages}) == len(stages)
    for stage in stages:
        assert (Path(parent.__file__).parent / f"{stage.module}.py").is_file()
    for group in groups:
        # What takes all memory, or is timed, has the device for itself.
        assert len(group) == 1 or not any(stage.whole_memory for stage in group)
    if not full:
        before_extras = groups[:-1]
        assert sum(max(s.seconds for s in g) for g in before_extras) <= 360


def test_failures_name_stage_and_check() -> None:
    row = {"config": "decode 1x1x64", "passed": False, "error": None, "largest_error": 0.5}
    fine = {"config": "fine", "passed": True, "error": None}
    refused = {"config": "refused", "passed": None, "error": None, "refused": "takes less"}
    result = {"checks": [row, fine, refused], "complete": True}
    report = {"stages": {"kernels-x": {"status": "ok", "seconds": 1.0, "result": result}}}
    assert failures(report) == ["kernels-x: decode 1x1x64: largest_error 0.5"]
    text = markdown(report)
    assert "1 of 2 configurations equal their oracle in poisoned pages, 1 are refused" in text
    assert "- decode 1x1x64: largest_error 0.5" in text


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check fails for an implementation that reads one key too many."""
    known = kernels.implementations()
    right = known["xla"]

    def off_by_one(q: Any, pages: Any, tables: Any, kv_lens: Any, *rest: Any) -> Any:
        return right.attention(q, pages, tables, kv_lens + (kv_lens > 0), *rest)

    wrong = kernels.Implementation("xla", off_by_one, right.write, right.platforms, right.automatic)
    monkeypatch.setattr("pallas_kernels.attention.choose", lambda *_: wrong)
    config = kernel_cases.Config("decode", (2, 1, 32), cells="float32")
    found = kernels._check_attention(config, wrong)
    assert found["passed"] is False
    assert not found["poison_changes_nothing"]


def test_cases_leave_most_of_the_cache_to_poison() -> None:
    config = kernel_cases.Config("decode", (2, 1, 32))
    case = kernel_cases.make_case(config, 0)
    layout = config.layout("gpu")
    poisoned = np.asarray(case.pages(layout, np.nan).cells)
    assert np.isnan(poisoned[0].astype(np.float32)).all()
    owned = case.owned.sum()
    assert owned == case.kv_lens.sum()
    assert np.isfinite(poisoned.astype(np.float32)).sum() == owned * 2 * 32

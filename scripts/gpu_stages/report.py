"""The results of all stages as Markdown, and what of them is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Result = dict[str, Any]
TARGETS = {
    "decode, bfloat16, uniform": (80, "decode", "uniform", "bfloat16"),
    "decode, bfloat16, Zipf lengths": (70, "decode", "zipf", "bfloat16"),
    "decode, int8": (65, "decode", "uniform", "int8"),
}
"""Percent of the copy bandwidth to reach, and the cells that it is about."""
_ALONE_TARGET = 60
"""The same of one long sequence alone."""
_PREFILL_TARGET = 35
"""Percent of the rate of a large product."""


def failures(report: Result) -> list[str]:
    """What did not end well, a line each."""
    found = []
    for name, stage in report["stages"].items():
        if stage["status"] != "ok":
            found.append(f"{name}: {stage['status']}")
        for check in (stage["result"] or {}).get("checks", []):
            if check["passed"] is False:
                what = check.get("config") or check.get("check")
                found.append(f"{name}: {what}: {check['error'] or _numbers(check)}")
    return found


def markdown(report: Result) -> str:
    """The whole report; parts without results are left out."""
    stages = report["stages"]
    results = {name: stage["result"] for name, stage in stages.items() if stage["result"]}
    parts = [
        _device(results.get("device")),
        *(_kernels(name, r) for name, r in results.items() if name.startswith("kernels-")),
        *(_checks(name, r) for name, r in results.items() if name in ("engine", "golden")),
        *(_roofline(name, r) for name, r in results.items() if name.startswith("roofline")),
        _targets(results),
        *(_decode(r) for name, r in results.items() if name.startswith("decode-")),
        *(_modes(r) for r in results.values() if "modes" in r),
        _stages(stages),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(header)
    lines = [titles, ["---"] * len(titles), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _device(result: Result | None) -> str:
    if result is None:
        return ""
    rates = []
    if "copy_bytes_per_s" in result:
        rates.append(f"device copy {result['copy_bytes_per_s'] / 1e9:,.0f} GB/s read and written")
    if "matmul_flop_per_s" in result:
        rate = result["matmul_flop_per_s"] / 1e12
        rates.append(f"bfloat16 product {rate:,.0f} TFLOP/s")
    measured = f"; in this run {', '.join(rates)}" if rates else ""
    return f"{result['kind']}, jax {result['jax']}{measured}."


def _kernels(name: str, result: Result) -> str:
    checks = result["checks"]
    passed = sum(check["passed"] is True for check in checks)
    refused = sum(check["passed"] is None for check in checks)
    worst = [check for check in checks if check["passed"] is False]
    head = (
        f"**{name}**: {passed} of {len(checks) - refused} configurations equal their oracle in "
        f"poisoned pages, {refused} are refused."
    )
    lines = [f"- {check['config']}: {check['error'] or _numbers(check)}" for check in worst]
    return "\n".join([head, *lines])


def _checks(name: str, result: Result) -> str:
    rows = [
        (
            check["check"],
            {True: "yes", False: "**no**", None: "-"}[check["passed"]],
            check["error"] or _numbers(check),
        )
        for check in result["checks"]
    ]
    return f"**{name}**\n\n{_table(('check', 'passed', 'found'), rows)}"


def _numbers(check: Result) -> str:
    skipped = ("check", "config", "passed", "error")
    return ", ".join(f"{k} {_short(v)}" for k, v in check.items() if k not in skipped)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _roofline(name: str, result: Result) -> str:
    rows = list(_roofline_rows(result))
    header = (
        *("op", "batch", "context", "mix", "pages", "size", "MB", "floor, us", "implementation"),
        *("us", "GB/s", "% of copy", "TFLOP/s", "times faster than xla"),
    )
    return f"**{name}**\n\n{_table(header, rows)}" if rows else ""


def _roofline_rows(result: Result) -> Iterator[tuple[str, ...]]:
    copy = result["copy_bytes_per_s"]
    for cell in result["cells"]:
        times = {r["implementation"]: r["seconds"] for r in cell["results"]}
        for r in cell["results"]:
            what = (
                *(str(cell[k]) for k in ("op", "batch", "context", "mix", "kv_dtype", "page_size")),
                f"{cell['floor_bytes'] / 1e6:.1f}",
                f"{1e6 * cell['floor_bytes'] / copy:.1f}",
                r["implementation"],
            )
            seconds, xla = r["seconds"], times.get("xla")
            if seconds is None:
                yield (*what, r["skipped"], *("",) * 4)
                continue
            yield (
                *what,
                f"{1e6 * seconds:.1f}",
                f"{r['bytes_per_s'] / 1e9:,.0f}",
                f"{100 * r['copy_share']:.0f}",
                f"{r['flop_per_s'] / 1e12:.1f}",
                "" if xla is None else f"{xla / seconds:.1f}",
            )


def _targets(results: dict[str, Result]) -> str:
    """The best implementation of this project against each target."""
    result = results.get("roofline")
    if result is None:
        return ""
    rows = []
    for what, (target, op, mix, kv_dtype) in TARGETS.items():
        shares = _shares(
            result, lambda c, key=(op, mix, kv_dtype): _key(c) == key and c["batch"] > 1
        )
        rows.append((what, f"{target} % of copy", _percents(shares)))
    alone = _shares(result, lambda c: c["op"] == "decode" and c["batch"] == 1)
    rows.append(("decode, one long sequence", f"{_ALONE_TARGET} % of copy", _percents(alone)))
    rate = result.get("matmul_flop_per_s")
    if rate:
        chunks = _shares(result, lambda c: c["op"] == "prefill", "flop_per_s")
        reached = _percents([flops / rate for flops in chunks])
        rows.append(("prefill chunk", f"{_PREFILL_TARGET} % of product", reached))
    return f"**Targets**\n\n{_table(('of', 'target', 'reached'), rows)}"


def _key(cell: Result) -> tuple[str, str, str]:
    return cell["op"], cell["mix"], cell["kv_dtype"]


def _shares(result: Result, of: Any, what: str = "copy_share") -> list[float]:
    """The most of `what` that a kernel of this project reached, in each cell that `of` picks."""
    ours = [
        [
            r[what]
            for r in cell["results"]
            if r["implementation"].startswith("pallas") and r[what] is not None
        ]
        for cell in result["cells"]
        if of(cell)
    ]
    return [max(shares) for shares in ours if shares]


def _percents(shares: list[float]) -> str:
    return ", ".join(f"{100 * share:.0f} %" for share in shares) or "not measured"


def _decode(result: Result) -> str:
    rows = [
        (
            str(row["slots"]),
            f"{1e3 * row['step_s']:.3f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{1e3 * row['floor_s']:.3f}",
            f"{100 * row['share_of_floor']:.0f} %",
            "-" if row["host_s"] is None else f"{1e3 * row['host_s']:.3f}",
            f"{row['prefill_tokens_per_s']:,.0f}",
        )
        for row in result["decode"]
    ]
    header = (
        *("slots", "step, ms", "tokens/s", "floor, ms", "share of floor", "host, ms"),
        "prefill, tokens/s",
    )
    compilations = result.get("compilations_after_ready")
    head = (
        f"**{result['model']}**, random {result['dtype']} weights, {result['kv_cache_dtype']} "
        f"pages, attention {result['attention']}, context {result['context']}: ready after "
        f"{result['ready_s']:.1f} s, {compilations} compile events after that."
    )
    return f"{head}\n\n{_table(header, rows)}"


def _modes(result: Result) -> str:
    rows = []
    for row in result["modes"]:
        if row["error"] is not None:
            rows.append((row["mode"], row["error"], *("",) * 4))
            continue
        rows.append(
            (
                row["mode"],
                str(row["slots"]),
                str(row["tokens"]),
                str(row["steps"]),
                f"{row['wall_s']:.2f}",
                f"{row['tokens_per_s']:,.0f}",
            )
        )
    header = ("batching", "slots", "tokens", "steps", "seconds", "tokens/s")
    return f"**Batching modes**, {result['model']}, one workload\n\n{_table(header, rows)}"


def _stages(stages: dict[str, Result]) -> str:
    rows = [
        (name, stage["status"], "" if stage["seconds"] is None else f"{stage['seconds']:.0f}")
        for name, stage in stages.items()
    ]
    return f"**Stages**\n\n{_table(('stage', 'status', 'seconds'), rows)}"

"""The tools: how each is installed and called, and where its results are.

Knows their command lines and files, of the versions named in docs/interop.md.  Does not know how
our server is started.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "examples" / "lm_eval"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

Summary = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What the tools are pointed at."""

    url: str
    model: str
    tokenizer: Path
    """Directory with tokenizer.json, tokenizer_config.json and config.json."""


@dataclass(frozen=True)
class Tool:
    """One run of one tool."""

    name: str
    environment: str
    """Its virtual environment's directory."""
    command: Callable[[Target, Path], list[str]]
    """Executable and arguments, for a target and a directory for results."""
    summary: Callable[[Path], Summary]
    """What it found, from that directory."""
    variables: Mapping[str, str]


PACKAGES = {
    "lm-eval": ["lm-eval[api]", "transformers"],
    "aiperf": ["aiperf"],
    "evalscope": ["evalscope[perf]"],
    "locust": ["locust"],
}
"""What pip installs into which environment."""


def _lm_eval(endpoint: str, tokenizer: str, tasks: str, *flags: str) -> Any:
    kind = "local-chat-completions" if "chat" in endpoint else "local-completions"

    def command(target: Target, out: Path) -> list[str]:
        arguments = [
            f"model={target.model}",
            f"base_url={target.url}{endpoint}",
            tokenizer.format(target=target),
            "num_concurrent=4",
            "max_retries=1",
        ]
        return [
            *("lm_eval", "run", "--model", kind),
            *("--model_args", ",".join(a for a in arguments if a)),
            *("--include_path", str(TASKS.relative_to(ROOT)), "--tasks", tasks),
            *("--output_path", str(out), "--log_samples", *flags),
        ]

    return command


def _lm_eval_summary(out: Path) -> Summary:
    report = json.loads(_newest(out, "results_*.json").read_text())
    return {
        f"{task} {metric.partition(',')[0]}": value
        for task, metrics in report["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, (int, float)) and "stderr" not in metric and "," in metric
    }


def _aiperf(target: Target, out: Path) -> list[str]:
    return [
        *("aiperf", "profile", "-m", target.model, "--tokenizer", str(target.tokenizer)),
        *("--url", target.url, "--endpoint-type", "chat", "--streaming"),
        *("--concurrency", "4", "--request-count", "24", "--random-seed", "1"),
        *("--synthetic-input-tokens-mean", "64", "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", "16", "--output-tokens-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--ui", "simple", "--artifact-dir", str(out)),
    ]


def _aiperf_summary(out: Path) -> Summary:
    report = json.loads(_newest(out, "profile_export_aiperf.json").read_text())
    names = {
        "request_count": "requests",
        "error_request_count": "errors",
        "usage_completion_tokens": "completion tokens per request, from usage",
        "time_to_first_token": "TTFT ms",
        "inter_token_latency": "ITL ms",
        "output_token_throughput": "output tokens/s",
    }
    found = {text: report[name]["avg"] for name, text in names.items() if report.get(name)}
    return {"errors": 0, **found}


def _evalscope(target: Target, out: Path) -> list[str]:
    return [
        *("evalscope", "perf", "--url", f"{target.url}/v1/chat/completions", "--api", "openai"),
        *("--model", target.model, "--tokenizer-path", str(target.tokenizer)),
        *("--parallel", "2", "4", "--number", "8", "16", "--dataset", "random"),
        *("--min-prompt-length", "64", "--max-prompt-length", "64", "--prefix-length", "0"),
        *("--min-tokens", "16", "--max-tokens", "16", "--stream", "--outputs-dir", str(out)),
    ]


def _evalscope_summary(out: Path) -> Summary:
    found: Summary = {"errors": 0}
    for path in sorted(_newest(out, "perf_report.html").parent.rglob("benchmark_summary.json")):
        report = json.loads(path.read_text())
        found["errors"] += report["Failed Requests"]
        for name in ("Success Requests", "Avg TTFT (ms)", "Avg ITL (ms)", "Avg Output Tokens"):
            found[f"{path.parent.name}: {name}"] = report[name]
    return found


def _locust(target: Target, out: Path) -> list[str]:
    return [
        *("locust", "-f", "scripts/interop/locustfile.py", "--headless", "--only-summary"),
        *("-u", "4", "-r", "4", "-t", "10s", "--host", target.url, "--csv", str(out / "locust")),
    ]


def _locust_summary(out: Path) -> Summary:
    with (out / "locust_stats.csv").open() as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    found: Summary = {
        "requests": int(rows["/v1/chat/completions"]["Request Count"]),
        "failures": int(rows["Aggregated"]["Failure Count"]),
    }
    for name in ("TTFT", "TPOT"):
        found[f"{name} ms, median"] = float(rows[name]["Median Response Time"])
    return found


def _newest(out: Path, pattern: str) -> Path:
    return max(out.rglob(pattern), key=lambda path: path.stat().st_mtime)


_HF = "tokenizer_backend=huggingface,tokenizer={target.tokenizer}"
TOOLS = (
    Tool(
        "lm-eval",
        "lm-eval",
        _lm_eval("/v1/completions", _HF, "facts_mc,facts_gen"),
        _lm_eval_summary,
        OFFLINE,
    ),
    Tool(
        "lm-eval-remote-tokenizer",
        "lm-eval",
        _lm_eval("/v1/completions", "tokenizer_backend=remote", "facts_mc"),
        _lm_eval_summary,
        OFFLINE,
    ),
    Tool(
        "lm-eval-chat",
        "lm-eval",
        _lm_eval("/v1/chat/completions", "", "facts_gen", "--apply_chat_template"),
        _lm_eval_summary,
        OFFLINE,
    ),
    # Offline mode would make aiperf look for the tokenizer's directory as a name on the hub.
    Tool("aiperf", "aiperf", _aiperf, _aiperf_summary, {}),
    Tool("evalscope", "evalscope", _evalscope, _evalscope_summary, OFFLINE),
    Tool("locust", "locust", _locust, _locust_summary, {}),
)

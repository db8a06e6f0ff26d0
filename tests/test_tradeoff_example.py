"""`examples/tradeoff.py` runs with jaxserve and, but for the import, with vLLM: stand-ins of both.

The stand-ins know only the names that the real ones have, so that any other name fails.
"""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput

SOURCE = (Path(__file__).parents[1] / "examples" / "tradeoff.py").read_text()


@dataclass(slots=True)
class SamplingParams:
    """What vLLM and jaxserve have in common, as far as the example needs it."""

    temperature: float = 1.0
    max_tokens: int | None = 16
    ignore_eos: bool = False


@dataclass(slots=True)
class RequestStateStats:
    """Of vLLM's V1 engine."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass(slots=True)
class OldRequestMetrics:
    """Of vLLM before it."""

    arrival_time: float
    last_token_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    time_in_queue: float | None
    finished_time: float | None = None


def of_jaxserve(ttft, gaps):
    return RequestMetrics(arrival_time=5.0, ttft=ttft, itl=gaps, e2e=ttft + sum(gaps))


def of_vllm(ttft, gaps):
    first = 100.0 + ttft  # a clock of another process than the arrival's
    return RequestStateStats(
        num_generation_tokens=1 + len(gaps),
        arrival_time=1.7e9,
        first_token_ts=first,
        last_token_ts=first + sum(gaps),
        first_token_latency=ttft,
    )


def of_old_vllm(ttft, gaps):
    return OldRequestMetrics(5.0, 5.0 + ttft + sum(gaps), 5.0, 5.0 + ttft, 0.0)


@dataclass
class Engines:
    """What the example made."""

    metrics: object
    made: list = field(default_factory=list)

    def llm(self, model, *, max_num_seqs, enable_prefix_caching, disable_log_stats):
        self.made.append((model, max_num_seqs, enable_prefix_caching))
        return SimpleNamespace(generate=self.generate, logs=not disable_log_stats)

    def generate(self, prompts, params, *, use_tqdm):
        assert params.ignore_eos
        return [self.output(number, prompt, params) for number, prompt in enumerate(prompts)]

    def output(self, number, prompt, params):
        """The n-th request waits n milliseconds longer; its gaps are 10 + n milliseconds."""
        gaps = [0.010 + number / 1000] * (params.max_tokens - 1)
        sample = CompletionOutput(0, "", list(range(params.max_tokens)), None, None, "length")
        metrics = self.metrics(0.5 + number / 1000, gaps)
        return RequestOutput(f"{number}", prompt, [1], None, [sample], True, metrics)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the example with a stand-in for the engine's module; its lines and engines."""

    def call(metrics, *arguments):
        engines = Engines(metrics)
        module = ModuleType("stand_in")
        module.LLM, module.SamplingParams = engines.llm, SamplingParams
        monkeypatch.setitem(sys.modules, "stand_in", module)
        monkeypatch.setattr(sys, "argv", ["tradeoff.py", *arguments])
        source, count = re.subn(
            r"^from jaxserve import", "from stand_in import", SOURCE, flags=re.M
        )
        assert count == 1
        exec(compile(source, "tradeoff.py", "exec"), {"__name__": "__main__", "__doc__": "x\n"})
        return capsys.readouterr().out.splitlines(), engines

    return call


@pytest.mark.parametrize("metrics", [of_jaxserve, of_vllm, of_old_vllm])
def test_the_example_measures_on_every_engine(run, monkeypatch, metrics):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    lines, engines = run(metrics, "--max-tokens", "5", "--model", "m")
    assert engines.made == [("m", size, True) for size in (1, 4, 8, 16, 32)]
    assert lines[0] == "100 prompts, prefix cache on"
    for size, line in zip((1, 4, 8, 16, 32), lines[2:7], strict=True):
        cells = [float(cell) for cell in line.split()]
        assert cells[0] == size
        assert cells[1] > 0
        # Mean of 0..99 is 49.5; 99 of 100 values do not exceed 98.
        assert cells[2:] == pytest.approx([549.5, 598.0, 59.5, 108.0])
    assert lines[7] == "no picture: matplotlib is not installed"


def test_the_prefix_cache_can_be_off(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = ("--no-prefix-caching", "--batch-sizes", "2", "3", "--num-prompts", "4")
    lines, engines = run(of_jaxserve, *arguments)
    assert engines.made == [(None, 2, False), (None, 3, False)]
    assert lines[0] == "4 prompts, prefix cache off"


def test_without_metrics_the_reason_is_said(run):
    with pytest.raises(SystemExit, match="no request metrics"):
        run(lambda ttft, gaps: None, "--num-prompts", "2")


def test_the_curve_is_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "t.png"
    lines, _ = run(of_vllm, "--num-prompts", "5", "--output", str(out))
    assert lines[-1] == f"picture: {out}"
    assert out.read_bytes().startswith(b"\x89PNG")

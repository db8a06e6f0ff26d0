"""An engine whose steps a test allows one by one, and the model around it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from jaxserve.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer
from scheduler import FinishReason

PATIENCE_S = 20


@dataclass
class ScriptedEngine:
    """Gives every sample the next letter in each step; prompts begin with a letter's code."""

    steps: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once for each step that may be made."""
    fail_with: BaseException | None = None
    """Raised by the next step."""
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    thread: threading.Thread | None = None
    """Where the last call came from."""
    observer: Any = None
    grammars: Any = None

    @property
    def scheduler(self) -> Any:
        return SimpleNamespace(num_waiting=0)

    @property
    def has_work(self) -> bool:
        return any(not output.finished for output in self.outputs.values())

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        prompt: str | None = None,
        priority: int = 0,
        key: str = "",
        whole: bool = False,
    ) -> str:
        self.thread = threading.current_thread()
        if not prompt_token_ids:
            raise ValueError("the prompt is empty")
        logprobs = [None for _ in prompt_token_ids] if params.prompt_logprobs is not None else None
        self.outputs[request_id] = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            prompt_logprobs=logprobs,
            outputs=[CompletionOutput(i, "", [], None, None, None) for i in range(params.n)],
            finished=False,
            metrics=RequestMetrics(arrival_time=0.0),
        )
        assert params.max_tokens is not None
        self.limits[request_id] = params.max_tokens
        return request_id

    def step(self) -> list[Delta]:
        if not self.steps.acquire(timeout=0.01):
            return []
        if self.fail_with is not None:
            raise self.fail_with
        return [
            self._grow(output, sample)
            for output in self.outputs.values()
            for sample in output.outputs
            if sample.finish_reason is None
        ]

    def _grow(self, output: RequestOutput, sample: CompletionOutput) -> Delta:
        token = output.prompt_token_ids[0] + len(sample.token_ids)
        sample.token_ids.append(token)
        sample.text += chr(token)
        if len(sample.token_ids) == self.limits[output.request_id]:
            sample.finish_reason = "length"
        output.finished = all(s.finish_reason is not None for s in output.outputs)
        return Delta(output.request_id, sample.index, chr(token), (token,), sample.finish_reason)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Delta]:
        output = self.output(request_id)
        left = [sample for sample in output.outputs if sample.finish_reason is None]
        for sample in left:
            sample.finish_reason = reason.value
        output.finished = True
        return [Delta(request_id, sample.index, "", (), reason.value) for sample in left]

    def output(self, request_id: str) -> RequestOutput:
        if request_id not in self.outputs:
            raise ValueError(f"no request {request_id!r}")
        return self.outputs[request_id]

    def is_finished(self, request_id: str) -> bool:
        return self.output(request_id).finished

    def take(self, request_id: str) -> RequestOutput:
        return self.outputs.pop(request_id)


def scripted_model(engine: ScriptedEngine) -> Any:
    """What `AsyncLLM.over` takes, around a scripted engine."""
    return SimpleNamespace(
        engine=engine,
        tokenizer=Tokenizer.of_bytes(),
        config=SimpleNamespace(warm_up=False, max_model_len=64, model="scripted"),
        model_config=SimpleNamespace(vocab_size=256),
        model_name="scripted",
        close=lambda: None,
    )

"""A model without a model: the LLM, engine and tokenizer that the verbs see, in plain Python.

Its tokens are bytes.  The answer to a prompt is a function of the prompt, the sample and the
position alone, so that tests can say what must come out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace

from jaxserve.config import EngineConfig
from jaxserve.models.config import ModelConfig
from jaxserve.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
)
from jaxserve.sampling_params import SamplingParams

VOCAB_SIZE = 300
SMALL_MODEL = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
END_OF_TURN = 257
MAX_MODEL_LEN = 200
FAILING = "FAIL"
"""A prompt with this text ends with reason "error" at its second token."""


def answer_byte(prompt_token_ids: list[int], index: int, position: int) -> int:
    return ord("a") + (sum(prompt_token_ids) + 7 * index + position) % 26


def answer(prompt: str | list[int], max_tokens: int, index: int = 0) -> str:
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    return "".join(chr(answer_byte(ids, index, i)) for i in range(max_tokens))


class FakeTokenizer:
    vocab_size = VOCAB_SIZE
    eos_token_ids = (END_OF_TURN,)
    chat_template = None
    response_template = None

    def encode(self, text: str, *, with_bos: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages, *, tools=None, add_generation_prompt=True, variables=None):
        if (variables or {}).get("explode"):
            raise RuntimeError("the template exploded")
        if not messages:
            raise ValueError("messages=[] has nothing to answer")
        ids = []
        for message in messages:
            ids += [256, *f"{message['role']}\n{message['content']}".encode(), END_OF_TURN]
        if tools:
            ids += b"tools"
        return ids + ([256] if add_generation_prompt else [])

    def decode(self, ids, skip_special_tokens=True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


@dataclass
class _Request:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    error: str | None = None
    text_tokens: list[list[int]] = field(default_factory=list)


class FakeEngine:
    def __init__(self, config: EngineConfig, step_s: float = 0.0) -> None:
        self.config = config
        self.step_s = step_s
        self.submitted: list[str | None] = []
        self.keys: list[str] = []
        self.most_samples = 0
        self.num_steps = 0
        self.on_step = lambda: None
        self._requests: dict[str, _Request] = {}
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return any(not _is_finished(request) for request in self._requests.values())

    def submit(
        self,
        prompt_token_ids,
        params,
        *,
        request_id=None,
        prompt=None,
        priority=0,
        key="",
        whole=False,
    ) -> str:
        if not prompt_token_ids:
            raise ValueError("the prompt has no tokens")
        if len(prompt_token_ids) >= MAX_MODEL_LEN:
            raise ValueError(
                f"the prompt has {len(prompt_token_ids)} tokens; at most {MAX_MODEL_LEN - 1} fit"
            )
        if max(prompt_token_ids) >= VOCAB_SIZE:
            raise ValueError(f"token id {max(prompt_token_ids)} is outside the vocabulary")
        params.check_against(VOCAB_SIZE, 20, frozenset([END_OF_TURN]))
        if request_id is None:
            request_id = f"r{self._next_id}"
            self._next_id += 1
        assert request_id not in self._requests, "request id in use"
        samples = [
            CompletionOutput(i, "", [], None, None if params.logprobs is None else [], None)
            for i in range(params.n)
        ]
        self._requests[request_id] = _Request(
            request_id, prompt, list(prompt_token_ids), params, samples, RequestMetrics(0.0)
        )
        self.keys.append(key)
        self.submitted.append(prompt or bytes(i % 256 for i in prompt_token_ids).decode())
        running = sum(len(r.outputs) for r in self._requests.values() if not _is_finished(r))
        self.most_samples = max(self.most_samples, running)
        return request_id

    def step(self) -> list[Delta]:
        time.sleep(self.step_s)
        self.num_steps += 1
        self.on_step()
        running = [
            (request, sample)
            for request in self._requests.values()
            for sample in request.outputs
            if sample.finish_reason is None
        ]
        return [self._advance(*pair) for pair in running[: self.config.max_num_seqs]]

    def _advance(self, request: _Request, sample: CompletionOutput) -> Delta:
        request.metrics.ttft = request.metrics.ttft or 0.25
        token = answer_byte(request.prompt_token_ids, sample.index, len(sample.token_ids))
        if request.params.max_tokens != 0:
            sample.token_ids.append(token)
            sample.text += chr(token)
            if sample.logprobs is not None:
                sample.logprobs.append(_logprobs(token, request.params.logprobs))
        if FAILING in (request.prompt or "") and len(sample.token_ids) == 2:
            sample.finish_reason = "error"
            request.error = "the logits were not finite"
        elif token in request.params.stop_token_ids:
            sample.finish_reason = "stop"
        elif len(sample.token_ids) >= self._max_tokens(request):
            sample.finish_reason = "length"
        return Delta(request.request_id, sample.index, chr(token), (token,), sample.finish_reason)

    def _max_tokens(self, request: _Request) -> int:
        room = MAX_MODEL_LEN - len(request.prompt_token_ids)
        return room if request.params.max_tokens is None else min(room, request.params.max_tokens)

    def abort(self, request_id: str) -> None:
        for sample in self._requests[request_id].outputs:
            sample.finish_reason = sample.finish_reason or "abort"

    def output(self, request_id: str) -> RequestOutput:
        request = self._requests[request_id]
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None:
            count = request.params.prompt_logprobs
            prompt_logprobs = [None, *(_logprobs(i, count) for i in request.prompt_token_ids[1:])]
        return RequestOutput(
            request_id=request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=request.outputs,
            finished=_is_finished(request),
            metrics=request.metrics,
            error=request.error,
        )

    def is_finished(self, request_id: str) -> bool:
        return _is_finished(self._requests[request_id])

    def take(self, request_id: str) -> RequestOutput:
        output = self.output(request_id)
        assert output.finished
        del self._requests[request_id]
        return output

    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(
            steps=self.num_steps,
            dispatches=self.num_steps,
            discarded_tokens=0,
            slot_utilisation=0.5,
            padded_share=0.25,
            preemptions=0,
            swaps=0,
            prefix_query_tokens=None,
            prefix_hit_tokens=None,
            compilations_after_ready=0,
            host_s_per_step=0.001,
            step_s=0.01,
            num_in_bounds=None,
        )

    def reset_stats(self) -> None:
        self.num_steps = 0

    def describe(self) -> dict:
        return {
            "pages": 10,
            "shapes": [8, 16],
            "memory": {"kv_cache_bytes": 3 * 2**20},
        }


def _is_finished(request: _Request) -> bool:
    return all(sample.finish_reason is not None for sample in request.outputs)


def _logprobs(token: int, count: int) -> dict[int, Logprob]:
    """The token has rank 3; ranks 1, 2, 4... are its successors."""
    top = {token: Logprob(-3.0, 3, chr(token))}
    for rank in [r for r in range(1, count + 1) if r != 3]:
        top[token + rank] = Logprob(-float(rank), rank, chr(token + rank))
    return top


class FakeLLM:
    created: list[FakeLLM] = []  # noqa: RUF012  (emptied by the fixture)

    def __init__(self, *, config: EngineConfig) -> None:
        self.config = config
        self.model_name = "fake"
        self.model_config = ModelConfig.from_hf(SMALL_MODEL, None)
        self.tokenizer = FakeTokenizer()
        self.engine = FakeEngine(config)
        FakeLLM.created.append(self)

    def close(self) -> None:
        pass

    def score(self, texts) -> list[ScoreOutput]:
        scores = []
        for item in texts:
            text = item if isinstance(item, str) else None
            ids = item["prompt_token_ids"] if text is None else self.tokenizer.encode(item)
            logprobs = [None, *(-0.5 for _ in ids[1:])]
            scores.append(ScoreOutput(text, list(ids), logprobs))
        return scores

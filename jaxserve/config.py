"""Engine configuration: one frozen dataclass, its validation, and YAML profiles.

Knows names, types, bounds and defaults.  Does not know the model, the device or the CLI
(which generates its options from these fields).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES = ("auto", "bfloat16", "float32", "float16")
LOAD_FORMATS = ("auto", "gguf", "hf", "orbax", "dummy")
DEVICES = ("auto", "cpu", "gpu", "tpu")
SCHEDULING_POLICIES = ("fcfs", "priority")
BATCHINGS = ("continuous", "static", "dynamic")
PREEMPTIONS = ("recompute", "swap", "auto")
KV_CACHE_DTYPES = ("auto", "bfloat16", "int8", "fp8")
ATTENTION_BACKENDS = (
    "auto",
    "xla",
    "pallas_triton",
    "pallas_mgpu",
    "pallas_interpret",
    "tpu",
    "reference",
    "cpu_amx",
    "cpu_avx512_bf16",
    "cpu_avx512",
    "cpu_avx2",
)
MASKED_STEPS = ("auto", "whole", "split", "off")
QUANTIZATIONS = ("none", "int8")
CPU_KERNELS = ("auto", "amx", "avx512_bf16", "avx512", "avx2", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")


def _option(default: Any, doc: str, choices: tuple[str, ...] | None = None) -> Any:
    """A config field whose help text and choices the CLI reads from its metadata."""
    return field(default=default, metadata={"help": doc, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that decides what the engine allocates and compiles.

    Field names are vLLM's where the meaning is vLLM's.  `None` means "choose by platform and
    model at start-up"; the chosen value is reported by `jaxserve inspect`.

    Raises:
        ValueError: a value is out of range, naming the field, the value and the bound.
    """

    model: str | None = _option(
        None,
        "GGUF file, Hugging Face directory, Orbax checkpoint or, with --load-format dummy, a "
        "config.json; the demo model SmolLM2-135M-Instruct if absent.",
    )
    load_format: str = _option("auto", "How to read the model.", LOAD_FORMATS)
    tokenizer: str | None = _option(None, "Directory or tokenizer.json; the model's own if absent.")
    chat_template: str | None = _option(None, "File with a Jinja chat template to use instead.")
    dtype: str = _option("auto", "Type of weights and KV; auto is bfloat16 everywhere.", DTYPES)
    quantization: str = _option(
        "none", "Form of the weights: as they are, or 8 bits in groups of 32.", QUANTIZATIONS
    )
    kv_cache_dtype: str = _option(
        "auto",
        "Type of the KV pages: the model's (auto), or 8 bits with a scale per token and head.",
        KV_CACHE_DTYPES,
    )
    max_model_len: int | None = _option(
        None, "Most tokens of a sequence, prompt and output; the model's context if absent."
    )
    max_num_seqs: int = _option(32, "Slots: sequences that run at once.")
    max_num_batched_tokens: int = _option(
        512, "Token budget: the most tokens one step computes, decodes and prefill chunks together."
    )
    block_size: int | None = _option(None, "Tokens per KV page; 16 on GPUs, 64 on CPUs.")
    num_kv_blocks: int | None = _option(
        None, "Pages of the KV cache, the null page included; from memory if absent."
    )
    memory_utilization: float = _option(
        0.9, "Share of an accelerator's memory that weights and KV cache may take together."
    )
    enable_prefix_caching: bool = _option(True, "Reuse the pages of a shared prefix.")
    enable_chunked_prefill: bool = _option(
        True, "Split prompts over steps; off needs max_num_batched_tokens >= max_model_len."
    )
    scheduling_policy: str = _option(
        "fcfs", "Order of admission: first come, or by priority first.", SCHEDULING_POLICIES
    )
    priority_ageing_s: float | None = _option(
        None,
        "Seconds of waiting that count as one level of priority, under the policy priority; "
        "never if absent.",
    )
    fair_share: bool = _option(
        False,
        "Next is the key (user or tenant) that was served least; the policy orders its requests.",
    )
    batching: str = _option(
        "continuous",
        "When requests join: as soon as there is room, when the whole batch before has ended, or "
        "so, but after waiting for company.",
        BATCHINGS,
    )
    dynamic_window_ms: float = _option(
        50.0, "How long a dynamic batch is collected, unless it is full before."
    )
    mixed: bool = _option(
        True, "Prefill and decode in one step; if not, decodes wait while prefills pend."
    )
    max_prefill_tokens: int | None = _option(
        None, "Most prompt tokens of a step; what the token budget and the buckets hold if absent."
    )
    target_ttft_ms: float | None = _option(
        None, "Bound on the time to the first token: dispatches keep it, goodput counts it."
    )
    target_tpot_ms: float | None = _option(
        None, "Bound on the time per output token: batch and chunks keep it, goodput counts it."
    )
    preemption: str = _option(
        "recompute",
        "What becomes of the pages of a sequence that must yield: computed anew, kept on the host, "
        "or what is estimated to cost less.",
        PREEMPTIONS,
    )
    swap_space_gib: float = _option(
        1.0, "Host memory for the pages of sequences that had to yield; unused with recompute."
    )
    async_scheduling: bool = _option(True, "Schedule step n+1 while step n runs on the device.")
    multi_step: int | None = _option(
        None,
        "Most decode steps that the device runs by itself while no request waits; 1 turns it off.",
    )
    batch_buckets: tuple[int, ...] | None = _option(
        None, "Decode batch sizes to compile; doubling up to max_num_seqs if absent."
    )
    prefill_buckets: tuple[int, ...] | None = _option(
        None, "Prefill chunk sizes to compile; a few up to max_num_batched_tokens if absent."
    )
    masked_steps: str = _option(
        "auto",
        "How steps that a structured output limits are run: whole, asking the host while they run "
        "(auto with the CPU kernels), split in two halves (auto elsewhere), or not at all.",
        MASKED_STEPS,
    )
    warm_up: bool = _option(
        True, "Run every executable once before the first request; off starts sooner."
    )
    deterministic: bool = _option(
        False, "One decode and one chunk bucket only: results cannot depend on the batch size."
    )
    max_logprobs: int = _option(20, "Largest number of top log-probabilities a request may ask.")
    tensor_parallel_size: int = _option(1, "Devices that share the KV heads of each layer.")
    device: str = _option("auto", "Platform to run on.", DEVICES)
    attention_backend: str = _option(
        "auto", "Implementation of attention; auto is the best for the device.", ATTENTION_BACKENDS
    )
    cpu_kernels: str = _option(
        "auto",
        "Instruction set of the C++ kernels on a CPU, compiled on first use; off leaves it to XLA.",
        CPU_KERNELS,
    )
    kernel_table: str | None = _option(
        None, "Kernel sizes measured by the tuner; the shipped ones of the GPU if absent."
    )
    seed: int = _option(0, "Seed of the requests that bring none, and of dummy weights.")
    cache_dir: str | None = _option(
        None, "Where fetched and converted models are kept; the user's cache directory if absent."
    )
    compilation_cache_dir: str | None = _option(
        None, "Where compiled executables are kept; under cache_dir if absent."
    )

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            choices, value = option.metadata["choices"], getattr(self, option.name)
            if choices is not None and value not in choices:
                raise ValueError(f"{option.name}={value!r} is not one of {', '.join(choices)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < least
            ):
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(f"memory_utilization={self.memory_utilization} must be in (0, 1]")
        if not 0 < self.swap_space_gib < float("inf"):
            raise ValueError(f"swap_space_gib={self.swap_space_gib} must be above 0")
        for name in ("priority_ageing_s", "target_ttft_ms", "target_tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value} must be above 0; leave it out for none")
        if not 0 <= self.dynamic_window_ms < float("inf"):
            raise ValueError(f"dynamic_window_ms={self.dynamic_window_ms} must be at least 0")
        if self.priority_ageing_s is not None and self.scheduling_policy != "priority":
            raise ValueError(
                f"priority_ageing_s={self.priority_ageing_s} needs scheduling_policy=priority, not "
                f"{self.scheduling_policy}"
            )
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must exceed "
                f"max_num_seqs={self.max_num_seqs}: each running sequence needs one token of the "
                "budget per step and prefill needs some more; raise it or lower max_num_seqs"
            )
        for name in ("batch_buckets", "prefill_buckets"):
            self._check_buckets(name)

    def _check_buckets(self, name: str) -> None:
        buckets = getattr(self, name)
        if buckets is None:
            return
        if not buckets or any(not isinstance(b, int) or b < 1 for b in buckets):
            raise ValueError(f"{name}={buckets!r} must be positive integers")
        if sorted(set(buckets)) != list(buckets):
            raise ValueError(f"{name}={buckets!r} must be strictly increasing")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build a config from plain keys (dashes or underscores).

        Raises:
            ValueError: unknown keys, all of them named, or a bad value.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        renamed = {key.replace("-", "_"): value for key, value in values.items()}
        unknown = sorted(set(renamed) - known)
        if unknown:
            raise ValueError(
                f"unknown configuration keys: {', '.join(unknown)}; known are "
                f"{', '.join(sorted(known))}"
            )
        for name in ("batch_buckets", "prefill_buckets"):
            if isinstance(renamed.get(name), list):
                renamed[name] = tuple(renamed[name])
        return cls(**renamed)


_LEAST = {
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 2,
    "block_size": 1,
    "num_kv_blocks": 2,
    "max_logprobs": 0,
    "max_prefill_tokens": 1,
    "multi_step": 1,
    "tensor_parallel_size": 1,
    "seed": 0,
}


def load_profile(path: str | Path) -> dict[str, Any]:
    """Read a YAML profile: one flat mapping whose keys are the long CLI flags.

    Raises:
        ValueError: the file cannot be read or is not a flat mapping.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the configuration file {str(path)!r}: {error}") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"configuration file {str(path)!r} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or any(isinstance(v, dict) for v in values.values()):
        raise ValueError(f"configuration file {str(path)!r} must be one flat mapping of flags")
    return {str(key).replace("-", "_"): value for key, value in values.items()}

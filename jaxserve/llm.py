"""Offline inference in a few lines: prompts in, answers out.

The interface is that of vLLM's `LLM`, so that its scripts run after a change of import.  All
work is the engine's; this module turns prompts into token ids and collects results.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.models.llama import Llama, Params, bind
from jaxserve.outputs import Delta, RequestOutput, ScoreOutput
from jaxserve.prompt import Prompt, encode_prompt
from jaxserve.sampling_params import SamplingParams
from jaxserve.startup import build

log = logging.getLogger(__name__)

Message = Mapping[str, Any]

RENAMED = {"gpu_memory_utilization": "memory_utilization", "download_dir": "cache_dir"}
"""vLLM's names for options that are called otherwise here."""
WITHOUT_EFFECT = frozenset(
    {
        "enforce_eager",
        "trust_remote_code",
        "disable_log_stats",
        "disable_custom_all_reduce",
        "swap_space",
        "max_seq_len_to_capture",
        "use_v2_block_manager",
    }
)
"""vLLM's options that a script may carry and that mean nothing here; they are logged."""


class LLM:
    """A model ready to answer.

    Args:
        model: a GGUF file, a Hugging Face directory or an Orbax checkpoint; the demo model
            SmolLM2-135M-Instruct if absent.
        config: a whole configuration; `options` then override its fields.
        options: fields of `EngineConfig` by name, vLLM's names where they differ.

    Raises:
        ValueError: the model or an option cannot be; one line with the remedy.
    """

    def __init__(
        self, model: str | None = None, *, config: EngineConfig | None = None, **options: Any
    ) -> None:
        """Load the model and compile or load every executable."""
        built = build(_configured(model, config, options))
        self.engine = built.engine
        self.config = built.config
        self.model_config = built.model_config
        self.tokenizer = built.tokenizer
        self.model_name = built.source.name

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Seq[int] | None = None,
        keys: Seq[str] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all at once; results in the order of the prompts.

        Args:
            prompts: one or several.
            sampling_params: one for all, or one each; the defaults if absent.
            use_tqdm: show a progress bar.
            priority: one number each, lower first, for the "priority" policy.
            keys: one user or tenant each, for the fair share.

        Raises:
            ValueError: a prompt or parameter is out of range; nothing has been generated then.
        """
        encoded = [self._encode(prompt) for prompt in _as_list(prompts)]
        return self._run(encoded, sampling_params, use_tqdm, priority, keys)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template.

        Text of special tokens inside a message's content is encoded as plain text: content
        cannot forge a turn.

        Raises:
            ValueError: no messages, a malformed one, or the model has no chat template.
        """
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Any = [messages] if one else messages
        encoded = [
            (
                None,
                self.tokenizer.encode_chat(
                    list(conversation),
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    variables=chat_template_kwargs,
                ),
            )
            for conversation in conversations
        ]
        return self._run(encoded, sampling_params, use_tqdm, None)

    def score(self, texts: Prompt | Seq[Prompt]) -> list[ScoreOutput]:
        """Log-likelihood of texts, token by token, through the same forward pass.

        Raises:
            ValueError: a text is empty or longer than the context.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0, detokenize=False)
        encoded = [self._encode(text) for text in _as_list(texts)]
        results = []
        for output in self._run(encoded, params, False, None):
            if output.error is not None:
                raise ValueError(f"text {output.prompt!r} cannot be scored: {output.error}")
            assert output.prompt_logprobs is not None
            logprobs = [
                None if entry is None else entry[token].logprob
                for token, entry in zip(
                    output.prompt_token_ids, output.prompt_logprobs, strict=True
                )
            ]
            results.append(ScoreOutput(output.prompt, output.prompt_token_ids, logprobs))
        return results

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Complete one prompt, yielding what each step adds; closing the iterator aborts it."""
        text, ids = self._encode(prompt)
        return self._stream(text, ids, sampling_params or SamplingParams())

    def stream_chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Delta]:
        """Answer one conversation, yielding what each step adds."""
        ids = self.tokenizer.encode_chat(
            list(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables=chat_template_kwargs,
        )
        return self._stream(None, ids, sampling_params or SamplingParams())

    def close(self) -> None:
        """Let go of what still loads in the background; the process can then end at once."""
        self.engine.runner.close()

    def get_tokenizer(self) -> Any:
        """The tokenizer."""
        return self.tokenizer

    @property
    def params(self) -> Params:
        """The weights being served: the canonical tree, ready for `bind` and `jax.grad`."""
        return self.engine.runner.params

    def module(self, params: Params | None = None) -> Llama:
        """The Flax module with these weights (the served ones if absent)."""
        return bind(self.model_config, self.params if params is None else params)

    def update_weights(self, params: Params) -> None:
        """Serve another tree of the same shapes, with the same executables.

        Raises:
            ValueError: the tree does not match.
        """
        self.engine.update_weights(params)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        return encode_prompt(prompt, self.tokenizer)

    def _run(
        self,
        encoded: Seq[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        use_tqdm: bool,
        priority: Seq[int] | None,
        keys: Seq[str] | None = None,
    ) -> list[RequestOutput]:
        params = _each(sampling_params or SamplingParams(), len(encoded), "sampling_params")
        priorities = _each(0 if priority is None else priority, len(encoded), "priority")
        owners = _each([""] * len(encoded) if keys is None else keys, len(encoded), "keys")
        asked = zip(encoded, params, priorities, owners, strict=True)
        ids: list[str] = []
        try:
            for (text, tokens), chosen, rank, key in asked:
                ids.append(
                    self.engine.submit(
                        tokens, chosen, prompt=text, priority=rank, key=key, whole=True
                    )
                )
            self._drain(ids, use_tqdm)
        except BaseException:
            self._abandon(ids)
            raise
        return [self.engine.take(request_id) for request_id in ids]

    def _drain(self, ids: list[str], use_tqdm: bool) -> None:
        from tqdm import tqdm

        with tqdm(total=len(ids), desc="prompts", disable=not use_tqdm) as bar:
            left = set(ids)
            while left:
                ended = {d.request_id for d in self.engine.step() if d.finish_reason is not None}
                done = {i for i in ended & left if self.engine.is_finished(i)}
                left -= done
                bar.update(len(done))

    def _stream(self, text: str | None, ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        request_id = self.engine.submit(ids, params, prompt=text)
        try:
            while not self.engine.is_finished(request_id):
                yield from (d for d in self.engine.step() if d.request_id == request_id)
        finally:
            self._abandon([request_id])

    def _abandon(self, ids: list[str]) -> None:
        for request_id in ids:
            self.engine.abort(request_id)
            self.engine.take(request_id)
        while self.engine.has_work and not self.engine.scheduler.has_work:
            self.engine.step()  # let a step in flight land


def _configured(
    model: str | None, config: EngineConfig | None, options: Mapping[str, Any]
) -> EngineConfig:
    ignored = sorted(WITHOUT_EFFECT & options.keys())
    if ignored:
        log.info("options without effect here: %s", ", ".join(ignored))
    values = {RENAMED.get(k, k): v for k, v in options.items() if k not in WITHOUT_EFFECT}
    if model is not None:
        values["model"] = model
    if config is None:
        return EngineConfig.from_mapping(values)
    checked = EngineConfig.from_mapping({**dataclasses.asdict(config), **values})
    return checked


def _as_list(prompts: Any) -> list[Any]:
    one = isinstance(prompts, (str, Mapping)) or (
        bool(prompts) and all(isinstance(p, int) for p in prompts)
    )
    return [prompts] if one else list(prompts)


def _each(value: Any, count: int, name: str) -> list[Any]:
    """`value` for each of `count` prompts, or its own items if it is a sequence."""
    if isinstance(value, (SamplingParams, int)):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts; give one each")
    return values

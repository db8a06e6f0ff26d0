"""`LLM` takes prompts in every form, gives results in their order and survives bad ones (B28)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.llm import LLM
from jaxserve.sampling_params import SamplingParams
from tests.engine.asks import FORCE, only
from tests.engine.golden import cases, load
from tests.engine.mini import tokens
from tests.oracle import assert_same_greedy
from tests.tokenizer.made import BOS, byte_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
EOS = 258


@pytest.fixture(scope="module")
def llm(executables: Path) -> LLM:
    return load("llama-gqa", executables)


@pytest.fixture(autouse=True)
def _still_answers(llm: LLM) -> Any:
    """After every test the engine is idle, whole and right."""
    yield
    case = cases("llama-gqa")[1]
    output = llm.generate({"prompt_token_ids": case["prompt_ids"]}, GREEDY)[0]
    assert_same_greedy(only(output), case["output_ids"][:8], case["top2_gaps"])
    llm.engine.check()
    assert not llm.engine._requests
    assert llm.engine.stats().compilations_after_ready == 0


def test_prompts_in_every_form(llm: LLM) -> None:
    text, ids = "to be or not", llm.tokenizer.encode("to be or not")
    want = only(llm.generate(text, GREEDY)[0])
    one: list[Any] = [ids, {"prompt": text}, {"prompt_token_ids": ids}]
    assert [only(llm.generate(prompt, GREEDY)[0]) for prompt in one] == [want] * 3
    many: list[Any] = [text, *one, (*ids,), np.array(ids)]
    outputs = llm.generate(many, GREEDY)
    assert [only(output) for output in outputs] == [want] * 6
    assert [output.prompt for output in outputs] == [text, None, text, None, None, None]
    both = llm.generate({"prompt": text, "prompt_token_ids": ids[:3]}, GREEDY)[0]
    assert (both.prompt, both.prompt_token_ids) == (text, ids[:3])
    assert llm.generate([], GREEDY) == []


def test_results_in_the_order_of_prompts(llm: LLM) -> None:
    prompts = [f"{'the ' * (i % 5)}{i}" for i in range(20)]
    params = [SamplingParams(temperature=0, max_tokens=20 - i, ignore_eos=True) for i in range(20)]
    outputs = llm.generate(prompts, params, priority=list(range(20, 0, -1)))
    assert [output.prompt for output in outputs] == prompts
    assert [len(only(output)) for output in outputs] == list(range(20, 0, -1))


BAD: list[tuple[Any, dict[str, Any], str]] = [
    ("", {}, "the prompt is empty"),
    ([""], {}, "the prompt is empty"),
    (["", "a"], {}, "the prompt is empty"),
    (["a", ""], {}, "the prompt is empty"),
    ([[]], {}, "the prompt is empty"),
    ({"prompt_token_ids": []}, {}, "the prompt is empty"),
    ({"text": "a"}, {}, "neither 'prompt'"),
    ([[300]], {}, "300 is outside the vocabulary of 300"),
    (["a" * 300], {}, "300 tokens, above max_model_len=257"),
    (["a", "b"], {"sampling_params": [GREEDY]}, "1 entries for 2 prompts"),
    (["a", "b"], {"priority": [1, 2, 3]}, "3 entries for 2 prompts"),
    (["a"] * 3, {"sampling_params": SamplingParams(logprobs=6)}, "max_logprobs=5"),
]


@pytest.mark.parametrize(("prompts", "fields", "message"), BAD)
def test_bad_prompts(llm: LLM, prompts: Any, fields: dict[str, Any], message: str) -> None:
    """Nothing is generated, nothing stays behind."""
    before = llm.engine.stats().steps
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, **{"sampling_params": GREEDY, **fields})
    assert llm.engine.stats().steps == before
    assert not llm.engine.has_work


@pytest.mark.parametrize("text", ["", "a", "<bos>a"])
def test_an_empty_text_starts_from_bos(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """B27, B28: with a tokenizer that adds BOS, there is exactly one."""
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True}
    monkeypatch.setattr(llm, "tokenizer", byte_tokenizer(settings))
    output = llm.generate([text], GREEDY)[0]
    assert output.prompt_token_ids == [BOS, *([97] if "a" in text else [])]
    assert len(only(output)) == 8


def test_chat(llm: LLM) -> None:
    def user(content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    one = llm.chat([user("hi")], GREEDY)[0]
    assert one.prompt_token_ids == llm.tokenizer.encode(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    several = llm.chat([[user("hi")], [user([{"type": "text", "text": "hi"}])]], GREEDY)
    assert tokens(several) == [[only(one)]] * 2
    assert len(only(llm.chat([user("")], GREEDY)[0])) == 8
    assert len(only(llm.chat([user(" ")], GREEDY)[0])) == 8
    assert [d for d in llm.stream_chat([user("hi")], GREEDY) if d.token_ids]
    for bad in ([], [[]], [{"role": "user"}], [user(5)], [user([{"type": "image_url"}])]):
        with pytest.raises(ValueError, match=r"message|content|part"):
            llm.chat(bad, GREEDY)


def test_stream_equals_generate(llm: LLM) -> None:
    want = llm.generate("to be", GREEDY)[0].outputs[0]
    deltas = list(llm.stream("to be", GREEDY))
    assert [token for delta in deltas for token in delta.token_ids] == want.token_ids
    assert "".join(delta.text for delta in deltas) == want.text
    assert [d.finish_reason for d in deltas][-1] == "length"


@pytest.mark.parametrize("how", ["close", "raise"])
def test_leaving_a_stream_aborts_it(llm: LLM, how: str) -> None:
    stream = llm.stream("to be", GREEDY)
    next(stream)
    assert llm.engine.has_work
    if how == "close":
        stream.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt())
    assert not llm.engine.has_work


def test_an_exception_while_running_leaves_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the user presses Ctrl-C in the middle of a batch."""
    step: Callable[[], Any] = llm.engine.step
    calls = iter(range(5))

    def interrupted() -> Any:
        if next(calls, None) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a b c"] * 12, GREEDY)
    assert not llm.engine.has_work


def test_weights_can_be_swapped_right_after_an_answer(llm: LLM) -> None:
    """Also after one that ended early, when a step that nobody needs may still be in flight."""
    stops = SamplingParams(temperature=0, max_tokens=20, logit_bias={EOS: FORCE})
    old = llm.params
    other = jax.tree.map(lambda leaf: np.asarray(leaf)[::-1].copy(), old)
    assert only(llm.generate("to be", stops)[0]) == [EOS]
    before = only(llm.generate("to be", GREEDY)[0])
    llm.generate("to be", stops)
    llm.update_weights(other)
    assert only(llm.generate("to be", GREEDY)[0]) != before
    llm.generate("to be", stops)
    llm.update_weights(old)
    assert only(llm.generate("to be", GREEDY)[0]) == before


def test_vllm_scripts_options(executables: Path) -> None:
    """Names that mean nothing here are accepted; names that nobody knows are not."""
    again = load("llama-gqa", executables, trust_remote_code=True, swap_space=4, seed=3)
    assert again.config.seed == 3
    with pytest.raises(ValueError, match="unknown configuration keys: max_seqs"):
        load("llama-gqa", executables, max_seqs=3)
    with pytest.raises(ValueError, match="no such file or directory"):
        LLM("no/such-model")

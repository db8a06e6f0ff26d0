"""Several decode steps in one dispatch give what single steps give, and are accounted for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.engine import Engine
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import MAX_STOP_IDS, SamplingParams
from jaxserve.shapes import StepShape
from tests.engine.asks import FORCE, only, sampled
from tests.engine.mini import CONFIG, Mini, drain, greedy, prompts, run, tokens
from tests.engine.pages import same, snapshot
from tests.engine.weights import copy, serving

EOS = frozenset({2, 7})
KS = [2, 4, 8]
WIDE = replace(CONFIG, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64)

FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 3},
    "unseeded": {"temperature": 0.9},
    "filters": {"temperature": 1.1, "seed": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
    },
    "bias": {"temperature": 0.8, "seed": 5, "logit_bias": {5: 3.0, 9: -100.0}},
    "allowed": {"temperature": 0.8, "seed": 6, "allowed_token_ids": list(range(60, 120))},
    "min_tokens": {"temperature": 1.5, "seed": 7, "min_tokens": 9, "stop_token_ids": [*range(60)]},
    "stop ids": {"temperature": 1.5, "seed": 8, "stop_token_ids": list(range(40))},
    "more stop ids than the device knows": {
        "temperature": 1.5,
        "seed": 9,
        "stop_token_ids": list(range(299, 299 - MAX_STOP_IDS - 20, -1)),
    },
    "stop string": {"temperature": 1.5, "seed": 10, "stop": ["a", "e", "1"]},
    "n": {"temperature": 1.0, "seed": 11, "n": 3},
    "prompt logprobs": {"temperature": 0, "prompt_logprobs": 3},
    "ignores eos": {"temperature": 1.5, "seed": 12, "ignore_eos": True},
    "one token": {"temperature": 0, "max_tokens": 1},
    "two tokens": {"temperature": 0, "max_tokens": 2},
}


def requests() -> list[tuple[list[int], SamplingParams]]:
    """One of every feature, ragged in length, with log-probabilities."""
    lengths = [3 + 5 * i % 31 for i in range(len(FEATURES))]
    return [
        (prompt, SamplingParams(**{"logprobs": i % 4, "max_tokens": 9 + 7 * i % 23, **fields}))
        for i, (prompt, fields) in enumerate(
            zip(prompts(lengths, seed=11), FEATURES.values(), strict=True)
        )
    ]


def told(output: RequestOutput) -> Any:
    """Everything that a request is told, but for times."""
    return output.outputs, output.prompt_logprobs, output.error


def steps(engine: Engine) -> tuple[int, int]:
    """Steps and dispatches."""
    stats = engine.stats()
    return stats.steps, stats.dispatches


@pytest.fixture(scope="module")
def wide(executables: Path) -> Mini:
    """Of common width: its rows have the same bits in steps of any shape (`test_invariance`)."""
    return Mini.build(executables, WIDE, prefill_buckets=(64,))


@pytest.fixture(scope="module")
def single(wide: Mini) -> list[Any]:
    engine = wide.engine(eos=EOS, asynchronous=False)
    outputs = run(engine, requests())
    assert steps(engine)[0] == steps(engine)[1]
    assert {o.outputs[0].finish_reason for o in outputs} == {"stop", "length"}
    return [told(output) for output in outputs]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("k", KS)
def test_every_feature_is_what_it_is_in_single_steps(
    wide: Mini, single: list[Any], k: int, every: int, asynchronous: bool
) -> None:
    """Tokens, text, reasons, and log-probabilities bit by bit."""
    engine = wide.engine(eos=EOS, multi_step=k, asynchronous=asynchronous)
    outputs = run(engine, requests(), every=every)
    for name, output, want in zip(FEATURES, outputs, single, strict=True):
        assert told(output) == want, name
    num_steps, num_dispatches = steps(engine)
    assert num_steps > num_dispatches
    assert engine.compilations.count == 0


def test_the_loop_gives_what_straight_line_code_gives(executables: Path, single: list[Any]) -> None:
    straight = Mini.build(executables, WIDE, prefill_buckets=(64,), multi_step=1)
    assert straight.runner.spec.batch_layout(StepShape(8, 0)).max_steps == 1
    assert [told(o) for o in run(straight.engine(eos=EOS), requests())] == single


def test_the_device_copies_no_cache_in_its_loop(mini: Mini) -> None:
    """Pages and counts go round the loop in place."""
    text = mini.runner._steps[StepShape(8, 0)].result().as_text()
    assert re.search(r"\bwhile\(", text)
    counts = mini.runner._carry.output_counts
    for leaf, cell in ((mini.runner._cache[0].cells, "f32"), (counts, "s32")):
        shape = rf"{cell}\[{','.join(map(str, leaf.shape))}\]"
        written = re.findall(rf"= {shape}\S* (scatter|copy|copy-start)\(", text)
        assert set(written) == {"scatter"}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_batch_that_ends_together_wastes_no_step(mini: Mini, asynchronous: bool) -> None:
    engine = mini.engine(multi_step=8, asynchronous=asynchronous)
    run(engine, [(prompt, greedy(18)) for prompt in prompts([5, 6, 7])])
    # Prefill, then 17 steps: 8, 8 and 1.
    assert steps(engine) == (18, 4)
    assert engine.stats().discarded_tokens == 0


def test_a_dispatch_ends_before_most_rows_would_be_idle(mini: Mini) -> None:
    engine = mini.engine(multi_step=8, asynchronous=False)
    asked = [4, 4, 4, 20]
    run(engine, [(p, greedy(n)) for p, n in zip(prompts([5] * 4), asked, strict=True)])
    # Prefill; the three steps that the short ones need; then the long one alone: 8 and 8.
    assert steps(engine) == (20, 4)


def first_use(output: list[int], not_before: int) -> int:
    """Place of a token that has not occurred before it."""
    return next(i for i in range(not_before, len(output)) if output[i] not in output[:i])


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("kind", ["eos", "stop id"])
def test_the_device_ends_a_row_by_itself(mini: Mini, kind: str, asynchronous: bool) -> None:
    """Nothing is sampled after the token that ends it, and the loop ends with its last row."""
    prompt = prompts([9], seed=3)[0]
    ask = sampled(40, temperature=1.5, seed=1)
    output = only(run(mini.engine(), [(prompt, ask)])[0])
    place = first_use(output, 11)
    eos = frozenset({output[place]}) if kind == "eos" else frozenset()
    ask = replace(ask, ignore_eos=False, stop_token_ids=[] if eos else [output[place]])
    engine = mini.engine(eos=eos, multi_step=8, asynchronous=asynchronous)
    ended = run(engine, [(prompt, ask)])[0].outputs[0]
    assert ended.token_ids == output[: place + 1]
    assert ended.finish_reason == "stop"
    assert engine.stats().steps == place + 1
    assert engine.stats().discarded_tokens == 0


def test_min_tokens_holds_on_the_device(mini: Mini) -> None:
    """An end token that is held back in the same dispatch in which a later one ends it."""
    prompt = prompts([9], seed=4)[0]
    ask = greedy(30, ignore_eos=False, min_tokens=5, logit_bias={2: FORCE})
    engine = mini.engine(eos=EOS, multi_step=8)
    ended = run(engine, [(prompt, ask)])[0].outputs[0]
    assert (len(ended.token_ids), ended.token_ids[-1], ended.finish_reason) == (6, 2, "stop")
    assert (engine.stats().steps, engine.stats().discarded_tokens) == (6, 0)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("k", KS)
def test_what_follows_a_stop_string_is_discarded_and_counted(
    mini: Mini, k: int, asynchronous: bool
) -> None:
    """Only the host knows the text, so the device goes on to the end of what it was given."""
    prompt = prompts([9], seed=5)[0]
    free = run(mini.engine(), [(prompt, greedy(60))])[0].outputs[0]
    stop = free.text[10]
    engine = mini.engine(multi_step=k, asynchronous=asynchronous)
    ended = run(engine, [(prompt, greedy(60, stop=[stop]))])[0].outputs[0]
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.token_ids == free.token_ids[: len(ended.token_ids)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    stats = engine.stats()
    assert stats.output_tokens == len(ended.token_ids)
    assert stats.steps == len(ended.token_ids) + stats.discarded_tokens
    assert stats.discarded_tokens <= (2 * k - 1 if asynchronous else k - 1)


def test_a_stop_string_outranks_an_end_in_the_same_dispatch(mini: Mini) -> None:
    """By length, by a token and by logits that are not finite, all of them later."""
    prompt = prompts([9], seed=5)[0]
    free = run(mini.engine(), [(prompt, greedy(60))])[0].outputs[0]
    stop = free.text[10]
    want = run(mini.engine(), [(prompt, greedy(60, stop=[stop]))])[0].outputs
    num_tokens = len(want[0].token_ids)
    assert num_tokens < 40
    later = free.token_ids[first_use(free.token_ids, num_tokens + 1)]
    for ask in (
        greedy(num_tokens + 2, stop=[stop]),
        greedy(60, stop=[stop], stop_token_ids=[later]),
    ):
        engine = mini.engine(multi_step=8)
        assert run(engine, [(prompt, ask)])[0].outputs == want
        assert engine.scheduler.pool.num_held == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_aborted_in_mid_flight(mini: Mini, asynchronous: bool) -> None:
    asked = [(prompt, greedy(40)) for prompt in prompts([7, 8, 9, 10])]
    want = tokens(run(mini.engine(), asked))
    engine = mini.engine(multi_step=8, asynchronous=asynchronous)
    ids = [engine.submit(*request) for request in asked]
    for _ in range(3):
        engine.step()
    engine.abort(ids[1])
    gone = engine.take(ids[1]).outputs[0]
    drain(engine)
    got = tokens([engine.take(ids[i]) for i in (0, 2, 3)])
    assert got == [want[0], want[2], want[3]]
    assert gone.finish_reason == "abort"
    assert 0 < len(gone.token_ids) < 40
    assert gone.token_ids == want[1][0][: len(gone.token_ids)]
    assert (engine.stats().discarded_tokens > 0) == asynchronous
    assert engine.scheduler.pool.num_held == 0


POISON = 13


@pytest.fixture(scope="module")
def untied(executables: Path) -> Mini:
    """Its head is not its embedding, so that a token can break what follows it, not itself."""
    config = replace(CONFIG, tie_embeddings=False, head_dim=32)
    return Mini.build(executables, config, batch_buckets=(8,), prefill_buckets=(16,))


def poisoned(params: Any) -> Any:
    params = copy(params)
    params["embed"][POISON] = np.nan
    return params


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_row_that_breaks_ends_on_the_device(untied: Mini, asynchronous: bool) -> None:
    """It keeps what it had before, and spoils neither a neighbour nor a page."""
    ban = {POISON: -FORCE}
    healthy = [(p, greedy(30, logit_bias=ban, logprobs=2)) for p in prompts([6, 19], seed=50)]
    healthy = [([t if t != POISON else 14 for t in p], ask) for p, ask in healthy]
    prompt = [t if t != POISON else 14 for t in prompts([9], seed=54)[0]]
    # Penalties wear the first token out, so that POISON comes in the middle of a dispatch.
    wear = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    breaks = greedy(20, logit_bias={20: FORCE, POISON: FORCE - 10}, **wear)
    with serving(untied, poisoned(untied.runner.params)):
        requests = [*healthy, (prompt, breaks)]
        want = [told(o) for o in run(untied.engine(asynchronous=False), requests)]
        engine = untied.engine(multi_step=8, asynchronous=asynchronous, pages=30)
        outputs = run(engine, requests)
        assert [told(o) for o in outputs] == want
        broken = outputs[2]
        assert broken.error is not None
        assert broken.outputs[0].finish_reason == "error"
        assert 3 < len(only(broken)) < 9
        assert only(broken)[-1] == POISON
        assert engine.stats().discarded_tokens == 0
        assert [told(o) for o in run(engine, healthy)] == want[:2]


@pytest.mark.parametrize("spare", [0, 1, 2, 5])
@pytest.mark.parametrize("k", KS)
def test_pages_that_nearly_run_out(mini: Mini, k: int, spare: int) -> None:
    """Fewer steps where the pages of all do not fit; preemption only where one step needs it."""
    asked = [(prompt, greedy(50)) for prompt in prompts([8, 9, 10, 11])]
    want = tokens(run(mini.engine(), asked))
    pages = 1 + 4 * 4 + spare  # four sequences of up to eight pages of eight
    engine = mini.engine(pages=pages, multi_step=k, max_len=70)
    assert tokens(run(engine, asked)) == want
    assert engine.stats().preemptions > 0
    num_steps, num_dispatches = steps(engine)
    assert num_dispatches < num_steps


def test_nobody_is_preempted_for_later_steps(mini: Mini) -> None:
    """Pages for all tokens there are, and none to spare: as few preemptions as in single steps."""
    asked = [(prompt, greedy(25)) for prompt in prompts([8, 8])]
    engine = mini.engine(pages=1 + 2 * 4, multi_step=8, max_len=33)
    run(engine, asked)
    assert engine.stats().preemptions == 0


def test_pages_filled_within_a_dispatch_are_found_again(mini: Mini) -> None:
    engine = mini.engine(multi_step=8)
    prompt = prompts([8], seed=8)[0]
    first = only(run(engine, [(prompt, greedy(40))])[0])
    longer = prompt + first
    again = run(engine, [(longer, greedy(8, logprobs=1))])[0]
    assert again.metrics.num_cached_tokens == (len(longer) - 1) // 8 * 8 == 40
    want = run(mini.engine(enable_prefix_caching=False), [(longer, greedy(8, logprobs=1))])[0]
    assert tokens([again]) == tokens([want])


@pytest.mark.parametrize(("asynchronous", "dispatches"), [(True, 2), (False, 1)])
def test_a_new_request_waits_for_the_dispatches_in_flight_only(
    mini: Mini, asynchronous: bool, dispatches: int
) -> None:
    engine = mini.engine(multi_step=8, asynchronous=asynchronous)
    engine.submit(prompts([5])[0], greedy(200))
    for _ in range(4):
        engine.step()
    before = engine.stats().steps
    late = engine.submit(prompts([6])[0], greedy(1))
    waited = 0
    while not engine.is_finished(late):
        engine.step()
        waited += 1
    # The step that computes it is dispatched by the next call.
    assert waited <= dispatches + 1
    assert engine.stats().steps - before <= 8 * (dispatches - 1) + 8 + 1
    drain(engine)


@pytest.mark.parametrize("ends", ["at any token", "by length"])
def test_no_slot_idles_while_a_request_waits(mini: Mini, ends: str) -> None:
    """Steps are single, unless it is known when the next slot becomes free."""
    may_stop = {"stop_token_ids": [299]} if ends == "at any token" else {}
    engine = mini.engine(multi_step=8, slots=2, asynchronous=False)
    lengths = [12, 15, 9]
    asked = [(p, greedy(n, **may_stop)) for p, n in zip(prompts([5, 6, 7]), lengths, strict=True)]
    ids = [engine.submit(*request) for request in asked]
    while not engine.is_finished(ids[0]):
        engine.step()
    assert engine.stats().steps == 12
    assert engine.stats().dispatches == (12 if may_stop else 1 + 2)  # of 8 and 3 steps
    late = engine.stats().steps
    engine.step()
    assert engine.scheduler.num_waiting == 0, "it joins at once"
    assert engine.stats().steps == late + 1
    assert [len(only(output)) for output in finish(engine, ids)] == lengths


def finish(engine: Engine, ids: list[str]) -> list[RequestOutput]:
    drain(engine)
    return [engine.take(request_id) for request_id in ids]


def test_a_row_that_has_ended_writes_nothing(wide: Mini) -> None:
    """Rows that end within a dispatch leave the cache as it is in single steps, bit by bit.

    Nobody needs a page more than its prompt did, so that each has the same ones both times.
    """
    asked = [(p, greedy(n)) for p, n in zip(prompts([9] * 5), [8, 8, 8, 5, 3], strict=True)]
    run(wide.engine(asynchronous=False), asked)
    want = snapshot(wide)
    engine = wide.engine(asynchronous=False, multi_step=8)
    run(engine, asked)
    assert steps(engine) == (8, 2)
    assert all(same(a, b) for a, b in zip(want, snapshot(wide), strict=True))


@pytest.mark.parametrize(
    "make", [lambda i: greedy(30, seed=i), lambda i: sampled(30, temperature=1.0, seed=i)]
)
def test_deltas_add_up(mini: Mini, make: Callable[[int], SamplingParams]) -> None:
    """One delta per dispatch and sample, with all its tokens, and a time for every token."""
    engine = mini.engine(multi_step=4)
    ids = [engine.submit(prompt, make(i)) for i, prompt in enumerate(prompts([5, 9, 20]))]
    deltas = drain(engine)
    assert max(len(d.token_ids) for d in deltas) == 4
    for request_id in ids:
        output = engine.take(request_id)
        mine = [d for d in deltas if d.request_id == request_id]
        assert [t for d in mine for t in d.token_ids] == only(output)
        assert "".join(d.text for d in mine) == output.outputs[0].text
        assert len(output.metrics.itl) == 29
        assert all(gap >= 0 for gap in output.metrics.itl)

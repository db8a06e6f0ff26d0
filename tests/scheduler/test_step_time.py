"""Models of step times: what a plan asks for, the fit of measured times, and the roofline."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from scheduler.step_time import Buckets, ChipSpec, FittedCost, ModelSpec, Roofline, StepWork
from tests.scheduler.harness import Harness

A100 = ChipSpec(name="A100", flops_per_s=312e12, bytes_per_s=2e12, memory_bytes=80e9)
MODEL_7B = ModelSpec(
    name="7B", num_params=7e9, num_layers=32, num_heads=32, num_kv_heads=32, head_dim=128
)


def decode(rows: int, kv_tokens: int, num_steps: int = 1) -> StepWork:
    return StepWork(
        rows=rows, chunk_tokens=0, kv_tokens=kv_tokens, num_steps=num_steps, num_seqs=rows
    )


def mixed(rows: int, chunk_tokens: int, kv_tokens: int) -> StepWork:
    return StepWork(rows=rows, chunk_tokens=chunk_tokens, kv_tokens=kv_tokens, num_seqs=rows + 1)


def test_the_work_of_plans() -> None:
    harness = Harness(token_budget=16, max_prefill_tokens=8, multi_step=4)
    harness.add(6, max_tokens=9)
    first = StepWork.of(harness.step())
    assert (first.rows, first.chunk_tokens, first.kv_tokens, first.num_pairs) == (0, 6, 6, 21)
    harness.add(10, max_tokens=9)
    second = StepWork.of(harness.step())
    # The first decodes its 7th token; the second computes 8 of its 10: 1 + ... + 8 pairs.
    assert (second.rows, second.chunk_tokens, second.kv_tokens) == (1, 8, 7 + 8)
    assert second.num_pairs == 7 + 36
    third = StepWork.of(harness.step())
    assert (third.chunk_tokens, third.kv_tokens, third.num_pairs) == (2, 8 + 10, 8 + 9 + 10)
    fourth = StepWork.of(harness.step())
    assert (fourth.rows, fourth.num_steps, fourth.num_seqs) == (2, 4, 2)
    assert fourth.total_kv_tokens == sum(9 + i + 11 + i for i in range(4))


def test_padding() -> None:
    buckets = Buckets(rows=(1, 4, 8), chunks=(16, 64))
    assert buckets.pad(decode(3, 30)) == (4, 0)
    assert buckets.pad(decode(8, 30)) == (8, 0)
    assert buckets.pad(mixed(2, 17, 30)) == (8, 64)
    assert Buckets().pad(mixed(2, 17, 30)) == (3, 17)


def true_seconds(work: StepWork, size: tuple[int, int]) -> float:
    """A device whose steps have a cost per dispatch, iteration, padded row, chunk row and key."""
    rows, chunk = size
    steps = work.num_steps * (2e-3 + 1e-4 * rows) + 5e-5 * chunk
    return 1e-3 + steps + 2e-7 * work.total_kv_tokens


def random_work(rng: random.Random) -> StepWork:
    rows = rng.randint(1, 16)
    kv_tokens = rows * rng.randint(10, 500)
    if rng.random() < 0.3:
        chunk = rng.randint(1, 128)
        return mixed(rows, chunk, kv_tokens + chunk)
    return decode(rows, kv_tokens, rng.choice((1, 2, 4)))


BUCKETS = Buckets(rows=(4, 8, 16), chunks=(32, 128))


def fitted(*, noise: float = 0.0, disturbed: float = 0.0, count: int = 2000) -> FittedCost:
    rng, cost = random.Random(1), FittedCost(BUCKETS)
    for _ in range(count):
        work = random_work(rng)
        seconds = true_seconds(work, BUCKETS.pad(work)) * rng.uniform(1 - noise, 1 + noise)
        cost.record(work, 20 * seconds if rng.random() < disturbed else seconds)
    return cost


def test_a_fit_finds_linear_times() -> None:
    cost, rng = fitted(), random.Random(2)
    for _ in range(100):
        work = random_work(rng)
        expected = true_seconds(work, BUCKETS.pad(work))
        assert cost.seconds(work) == pytest.approx(expected, rel=0.01)


def test_a_fit_endures_noise_and_disturbances() -> None:
    cost, rng = fitted(noise=0.1, disturbed=0.01), random.Random(2)
    for _ in range(100):
        work = random_work(rng)
        expected = true_seconds(work, BUCKETS.pad(work))
        assert cost.seconds(work) == pytest.approx(expected, rel=0.2)


def test_the_times_of_what_was_measured_add_up() -> None:
    cost, rng, known, predicted = FittedCost(), random.Random(3), 0.0, 0.0
    works = [random_work(rng) for _ in range(500)]
    for work in works:
        seconds = true_seconds(work, BUCKETS.pad(work)) * rng.uniform(0.9, 1.1)
        known += seconds
        cost.record(work, seconds)
    predicted = sum(cost.seconds(work) for work in works)
    assert predicted == pytest.approx(known, rel=0.02)


def test_an_unknown_bucket_is_predicted_from_its_kind() -> None:
    cost = FittedCost(BUCKETS)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8) * 10:
        work = decode(rows, 100 * rows)
        cost.record(work, true_seconds(work, BUCKETS.pad(work)))
    work = decode(16, 1600)
    assert cost.seconds(work) == pytest.approx(true_seconds(work, (16, 0)), rel=0.1)
    assert cost.seconds(mixed(16, 128, 1000)) > 0  # at least what a decode step takes


def test_a_fit_follows_a_machine_that_has_become_slower() -> None:
    cost = FittedCost()
    for _ in range(500):
        cost.record(decode(4, 400), 1e-3)
    for _ in range(3000):
        cost.record(decode(4, 400), 10e-3)
    assert cost.seconds(decode(4, 400)) == pytest.approx(10e-3, rel=0.15)


def test_nothing_is_known_at_first() -> None:
    cost = FittedCost()
    assert cost.num_records == 0
    assert cost.seconds(decode(4, 400)) == 0.0


def test_what_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seconds=0\.0 must be positive"):
        FittedCost().record(decode(1, 1), 0.0)


def test_more_work_never_takes_less() -> None:
    """Also far from what was measured, with times that fell with size by chance."""
    cost = FittedCost()
    for rows, seconds in ((4, 3e-3), (5, 2.9e-3), (6, 2.8e-3)) * 20:
        cost.record(decode(rows, 100 * rows), seconds)
    times = [cost.seconds(decode(rows, 100 * rows)) for rows in (1, 8, 64, 512)]
    assert times == sorted(times)
    assert times[0] > 0


def test_what_did_not_vary_does_not_grow() -> None:
    cost = FittedCost()
    for _ in range(20):
        cost.record(decode(1, 9), 2e-3)
    assert cost.seconds(decode(1, 500)) == pytest.approx(2e-3, rel=0.1)
    assert cost.seconds(decode(1, 9, num_steps=4)) == pytest.approx(8e-3, rel=0.1)


def test_a_table_travels_as_json() -> None:
    cost = fitted(noise=0.1)
    copy = FittedCost.from_dict(json.loads(json.dumps(cost.to_dict())))
    rng = random.Random(4)
    works = [random_work(rng) for _ in range(50)]
    assert [copy.seconds(work) for work in works] == [cost.seconds(work) for work in works]
    assert copy.num_records == cost.num_records == 2000
    copy.record(works[0], 1e-3)
    assert copy.num_records == 2001


def test_other_json_is_no_table() -> None:
    with pytest.raises(ValueError, match="not a table of step times"):
        FittedCost.from_dict({"wall_s": 1.0})
    values = fitted(count=10).to_dict()
    values["decode"]["moments"].pop()
    with pytest.raises(ValueError, match="5 features"):
        FittedCost.from_dict(values)


def test_a_decode_step_of_one_sequence_reads_the_weights() -> None:
    """14 GB at 2 TB/s: the published 7 ms, 143 tokens per second."""
    seconds = Roofline(A100, MODEL_7B).seconds(decode(1, 1))
    assert seconds == pytest.approx(7.0e-3, rel=1e-3)
    assert 1 / seconds == pytest.approx(143, rel=1e-2)


def test_the_published_batch_of_32_has_contexts_of_240_tokens() -> None:
    """Published: about 9 ms, 3,600 tokens/s, 25 times the throughput at 1.3 times the latency.

    With no keys to read the step would take as long as that of one sequence.  Each token of the
    cache is half a megabyte, so 2 ms are 240 tokens of each of 32 sequences.
    """
    roofline = Roofline(A100, MODEL_7B)
    assert MODEL_7B.kv_bytes_per_token == 524288
    one, bare = roofline.seconds(decode(1, 240)), roofline.seconds(decode(32, 32))
    full = roofline.seconds(decode(32, 32 * 240))
    assert bare == pytest.approx(7.0e-3, rel=5e-3)
    assert full == pytest.approx(9.0e-3, rel=5e-3)
    assert 32 / full == pytest.approx(3600, rel=0.02)
    assert (32 / full) / (1 / one) == pytest.approx(25, rel=0.01)
    assert full / one == pytest.approx(1.3, rel=0.03)


def test_a_long_prompt_is_bound_by_operations() -> None:
    roofline = Roofline(A100, MODEL_7B)
    work = StepWork(rows=0, chunk_tokens=2048, kv_tokens=2048, num_seqs=1, num_pairs=2048 * 1024)
    products = 2048 * 14e9 + 2048 * 1024 * 4 * 32 * 32 * 128
    assert roofline.seconds(work) == pytest.approx(products / 312e12)


def test_several_steps_grow_their_context() -> None:
    roofline = Roofline(A100, MODEL_7B, overhead_s=1e-4)
    steps = [roofline.seconds(decode(4, 100 + 4 * i)) for i in range(3)]
    assert roofline.seconds(decode(4, 100, num_steps=3)) == pytest.approx(sum(steps))
    assert steps[0] < steps[2]


def test_chips_share_the_work_and_the_memory() -> None:
    one, two = Roofline(A100, MODEL_7B), Roofline(A100, MODEL_7B, num_chips=2)
    work = decode(8, 800)
    assert two.seconds(work) == pytest.approx(one.seconds(work) / 2)
    assert one.num_kv_tokens(0.9) == int((72e9 - 14e9) // 524288)
    assert two.num_kv_tokens(0.9) == int((144e9 - 14e9) // 524288)
    large = replace(MODEL_7B, name="70B", num_params=70e9)
    with pytest.raises(ValueError, match=r"140 GB of weights of 70B do not fit 90% .* 1 A100"):
        Roofline(A100, large).num_kv_tokens(0.9)

"""What a caller may ask for: every value out of range is refused by its field's name
(B13, B14, B17, B19, B25)."""

from __future__ import annotations

import math
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import pytest

from jaxserve.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams
from jaxserve.structured import StructuredOutputsParams

VOCAB = 300

NUMBERS = {
    "temperature": (0, 2000),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.001, 1000),
}
INTEGERS = {
    "n": (1, 1024),
    "top_k": (-1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, 2**31 - 1),
    "prompt_logprobs": (0, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
}
OPTIONAL = {"max_tokens", "logprobs", "prompt_logprobs", "seed"}
FLAGS = ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"]
LISTS = ["stop_token_ids", "allowed_token_ids"]
OTHERS = ["stop", "logit_bias", "structured_outputs"]


def made(name: str, value: Any) -> SamplingParams:
    """With one field set, and the others as far as that needs."""
    extra = {"max_tokens": None} if name == "min_tokens" else {}
    return SamplingParams(**{**extra, name: value})


def refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        made(name, value)


def test_the_tables_above_have_every_field() -> None:
    known = [*NUMBERS, *INTEGERS, *FLAGS, *LISTS, *OTHERS]
    assert sorted(known) == sorted(field.name for field in fields(SamplingParams))


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, True, False, "0.5", "nan", None, [1], {}, 1e400],
    ids=repr,
)
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_finite_number_is_refused(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize("name", NUMBERS)
def test_an_integer_beyond_every_float_is_refused(name: str) -> None:
    refused(name, 10**400)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, True, False, "5", "x", 1.5, 1.0, [1], {}], ids=repr
)
@pytest.mark.parametrize("name", INTEGERS)
def test_what_is_no_integer_is_refused(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize("name", sorted(INTEGERS.keys() - OPTIONAL))
def test_counts_with_a_default_cannot_be_left_open(name: str) -> None:
    refused(name, None)


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_counts_that_may_be_left_open(name: str) -> None:
    assert getattr(made(name, None), name) is None


@pytest.mark.parametrize(("name", "bounds"), [*NUMBERS.items(), *INTEGERS.items()])
def test_bounds_are_inside_and_what_is_beyond_them_is_refused(
    name: str, bounds: tuple[float, float]
) -> None:
    low, high = bounds
    for value in bounds:
        assert getattr(made(name, value), name) == value
    step = 1 if name in INTEGERS else 1e-6
    refused(name, high + step)
    if name != "max_tokens":  # 0 has a rule of its own
        refused(name, low - step)


def test_a_negative_count_of_tokens_is_refused() -> None:
    refused("max_tokens", -1)
    refused("max_tokens", 0)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0


@pytest.mark.parametrize("value", [0, 1, "true", None, math.nan])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_booleans(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": -0.0}, True),
        ({"temperature": 1e-40}, True),
        ({"temperature": 1e-12}, False),
        ({"top_k": 1}, True),
        ({"top_p": 0}, True),
        ({"top_p": 1e-9}, False),
        ({"top_k": 2, "top_p": 0.5}, False),
        ({}, False),
    ],
)
def test_what_is_greedy(fields: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**fields).is_greedy is greedy


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], ("",)], ids=repr)
def test_an_empty_stop_string_is_refused(stop: Any) -> None:
    refused("stop", stop)


@pytest.mark.parametrize("stop", [5, [1], [None], True, ["a", 1], {"a": 1}, b"x", [b"x"]], ids=repr)
def test_stop_strings_are_text(stop: Any) -> None:
    refused("stop", stop)


@pytest.mark.parametrize(
    ("stop", "strings"),
    [(None, ()), ([], ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",))],
)
def test_stop_strings(stop: Any, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize("value", [5, "5", [1.0], [True], ["5"], [None], {5: 1}, {5}], ids=repr)
@pytest.mark.parametrize("name", LISTS)
def test_lists_of_token_ids(name: str, value: Any) -> None:
    refused(name, value)
    assert getattr(made(name, [3, 4]), name) == (3, 4)


def test_an_empty_list_of_allowed_tokens_is_refused() -> None:
    refused("allowed_token_ids", [])
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == ()


@pytest.mark.parametrize(
    "bias",
    [
        {"abc": 1},
        {"": 1},
        {None: 1},
        {True: 1},
        {1.0: 1},
        {(1,): 1},
        {5: 1000},
        {5: -100.1},
        {5: "x"},
        {5: "1"},
        {5: None},
        {5: True},
        {5: math.nan},
        {5: math.inf},
        {5: -math.inf},
        [5],
        5,
        "5",
        {token: 1.0 for token in range(MAX_LOGIT_BIAS + 1)},
    ],
    ids=lambda bias: repr(bias)[:20],
)
def test_logit_bias_is_checked(bias: Any) -> None:
    refused("logit_bias", bias)


@pytest.mark.parametrize(
    ("bias", "want"),
    [
        (None, None),
        ({}, {}),
        ({5: 1}, {5: 1.0}),
        ({"5": -100, "7": 100}, {5: -100.0, 7: 100.0}),
        (MappingProxyType({5: 0.5}), {5: 0.5}),
    ],
)
def test_logit_bias(bias: Any, want: Any) -> None:
    assert SamplingParams(logit_bias=bias).logit_bias == want


def test_as_many_entries_of_logit_bias_as_the_device_holds() -> None:
    bias = {token: 1.0 for token in range(MAX_LOGIT_BIAS)}
    assert SamplingParams(logit_bias=bias).logit_bias == bias


@pytest.mark.parametrize(
    "value",
    [{"regex": "a+"}, {"choice": ["a", "b"]}, {"json": {"type": "object"}}, {"json_object": True}],
)
def test_a_constraint_may_be_a_plain_mapping(value: Any) -> None:
    constraint = SamplingParams(structured_outputs=value).structured_outputs
    assert isinstance(constraint, StructuredOutputsParams)
    assert constraint == StructuredOutputsParams(**value)
    assert constraint.kind == next(iter(value))


@pytest.mark.parametrize(
    "value",
    [
        "a+",
        {},
        {"json_object": False},
        {"regex": "a", "choice": ["a"]},
        {"regex": ""},
        {"regex": 5},
        {"grammar": ["start: A"]},
        {"json": 5},
        {"json_object": 1.5},
        {"choice": []},
        {"choice": "yes"},
        {"choice": ["a", ""]},
        {"choice": [1]},
        {"pattern": "a"},
    ],
)
def test_constraints_are_checked(value: Any) -> None:
    refused("structured_outputs", value)


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^min_tokens=5 is larger than max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=400, max_tokens=None).max_tokens is None


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match=r"^stop=.*detokenize=False"):
        SamplingParams(stop="x", detokenize=False)


def check(params: SamplingParams, end_ids: frozenset[int] = frozenset()) -> None:
    params.check_against(VOCAB, max_logprobs=5, end_ids=end_ids)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
@pytest.mark.parametrize("name", [*LISTS, "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(name: str, token: int) -> None:
    ids: Any = {token: 5.0} if name == "logit_bias" else [token]
    with pytest.raises(ValueError, match=rf"^{name} has token id {token}, .* of {VOCAB}$"):
        check(made(name, ids))
    for inside in (0, VOCAB - 1):
        check(made(name, {inside: 5.0} if name == "logit_bias" else [inside]))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_engine_reports_are_refused(name: str) -> None:
    check(made(name, 5))
    with pytest.raises(ValueError, match=rf"^{name}=6 is above .*max_logprobs=5"):
        check(made(name, 6))


def test_min_tokens_holds_back_a_limited_number_of_end_tokens() -> None:
    ends = frozenset(range(MAX_STOP_IDS + 1))
    check(SamplingParams(), ends)
    check(SamplingParams(min_tokens=1), ends - {0})
    with pytest.raises(ValueError, match=r"^min_tokens with 65 end tokens; at most 64"):
        check(SamplingParams(min_tokens=1), ends)


def test_min_tokens_must_leave_an_allowed_token() -> None:
    params = SamplingParams(min_tokens=1, allowed_token_ids=[5, 6])
    check(params, frozenset({5}))
    with pytest.raises(ValueError, match=r"^min_tokens=1 holds back every one of allowed_token_"):
        check(params, frozenset({5, 6, 7}))
    check(SamplingParams(allowed_token_ids=[5]), frozenset({5}))


def test_parameters_cannot_be_changed_and_the_callers_objects_are_not_kept() -> None:
    bias, ids = {5: 1.0}, [3]
    params = SamplingParams(logit_bias=bias, stop_token_ids=ids)
    bias[6], ids[0] = 2.0, 4
    assert params.logit_bias == {5: 1.0}
    assert params.stop_token_ids == (3,)
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]

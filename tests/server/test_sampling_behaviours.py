"""Sampling parameters at and beyond their edges, over HTTP: B12, B13, B14, B17."""

from __future__ import annotations

import httpx
import pytest

from tests.server.model import VOCAB
from tests.server.requests import CHAT, COMPLETIONS, ask, canary, choice_text, prepared, refused

PATHS = [COMPLETIONS, CHAT]


@pytest.fixture(autouse=True)
def unharmed(client: httpx.Client):
    """Whatever was asked, the canary sings as before."""
    before = canary(client)
    yield
    assert canary(client) == before


def text(client: httpx.Client, **body: object) -> str:
    answer = ask(client, COMPLETIONS, max_tokens=10, ignore_eos=True, **body)
    assert answer["usage"]["completion_tokens"] == 10
    return choice_text(answer["choices"][0])


def test_b12_top_p_from_zero_to_one(client: httpx.Client) -> None:
    greedy = text(client, temperature=0)
    free = text(client, temperature=1, seed=7)
    for tiny in (0, 1e-9, 1e-4):
        assert text(client, temperature=1, seed=7, top_p=tiny) == greedy
    assert text(client, temperature=1, seed=7, top_p=1.0) == free
    assert text(client, temperature=1, seed=7, top_p=0.999999)


NOT_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", '"2.5"', "true", "[]"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty"])
def test_b13_values_that_are_no_numbers(client: httpx.Client, path: str, field: str) -> None:
    head = '"messages": [{"role": "user", "content": "x"}]' if path == CHAT else '"prompt": "x"'
    for value in NOT_NUMBERS:
        body = f'{{{head}, "{field}": {value}}}'
        response = client.post(path, content=body, headers={"content-type": "application/json"})
        error = refused(response, field)
        assert error["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 1e9),
        ("top_p", -0.1),
        ("top_p", 2.5),
        ("min_p", -1),
        ("min_p", 1.5),
        ("presence_penalty", -2.5),
        ("frequency_penalty", 2.5),
        ("repetition_penalty", 0),
        ("top_k", 1.5),
        ("top_k", -2),
        ("n", 0),
        ("n", 2.5),
        ("seed", 2**70),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_b13_values_out_of_range(client: httpx.Client, path: str, field: str, value: float) -> None:
    error = refused(client.post(path, json=prepared(path, {field: value})), field)
    assert error["param"] == field


def test_b14_top_k_beyond_the_vocabulary(client: httpx.Client) -> None:
    free = text(client, temperature=1, seed=3)
    for off in (0, -1, VOCAB, VOCAB + 1, 9999999):
        assert text(client, temperature=1, seed=3, top_k=off) == free
    assert text(client, temperature=1, seed=3, top_k=1) == text(client, temperature=0)
    assert text(client, temperature=1, seed=3, top_k=VOCAB - 1)


def test_b17_logit_bias_forces_and_bans(client: httpx.Client) -> None:
    plain = text(client, temperature=0)
    assert text(client, temperature=0, logit_bias={}) == plain
    assert text(client, temperature=0, logit_bias={str(ord("Z")): 100}) == "Z" * 10
    banned = text(client, temperature=0, logit_bias={str(ord(plain[0])): -100})
    assert plain[0] not in banned


@pytest.mark.parametrize(
    "bias", [{str(VOCAB): 5}, {"-1": 5}, {"abc": 1}, {"5": 1000}, {"5": "x"}, {"1.5": 1}, [1]]
)
@pytest.mark.parametrize("path", PATHS)
def test_b17_invalid_biases(client: httpx.Client, path: str, bias: object) -> None:
    error = refused(client.post(path, json=prepared(path, {"logit_bias": bias})), "logit_bias")
    assert error["param"] == "logit_bias"

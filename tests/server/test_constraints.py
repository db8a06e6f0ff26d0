"""Constraints over HTTP that cannot be followed are the client's to mend, at once or in the end."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.requests import CANARY, CHAT, COMPLETIONS, HELLO

GOOD = {"structured_outputs": {"regex": "[ab]{4}"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"structured_outputs": {"regex": "[a"}}, "unclosed"),
        ({"structured_outputs": {"json": {"type": "foo"}}}, "foo"),
        ({"structured_outputs": {"choice": ["abc"]}, "allowed_token_ids": [100]}, "allowed_token"),
        ({"response_format": {"type": "json_object"}, "allowed_token_ids": [100]}, "allowed_token"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_refusals(client: httpx.Client, path: str, fields: dict[str, Any], words: str) -> None:
    asked = {"prompt": "hi"} if path == COMPLETIONS else {"messages": HELLO}
    before = client.post(COMPLETIONS, json=CANARY).json()["choices"]
    response = client.post(path, json={**asked, **fields, "max_tokens": 8})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert words in message
    assert "\n" not in message
    assert len(message) < 700
    assert client.post(COMPLETIONS, json=CANARY).json()["choices"] == before


def test_the_field_that_was_sent_is_blamed(client: httpx.Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}
    response = client.post(COMPLETIONS, json={"prompt": "hi", "response_format": schema})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "response_format")
    assert error["message"].startswith("response_format")


def test_what_can_be_followed_is(client: httpx.Client) -> None:
    body = {"prompt": "hi", "max_tokens": 8, "temperature": 1, "seed": 3, **GOOD}
    (choice,) = client.post(COMPLETIONS, json=body).json()["choices"]
    assert set(choice["text"]) <= set("ab")
    assert (len(choice["text"]), choice["finish_reason"]) == (4, "stop")

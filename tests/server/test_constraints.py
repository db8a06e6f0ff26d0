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


def test_what_can_be_followed_is(client: httpx.Client) -> None:
    body = {"prompt": "hi", "max_tokens": 8, "temperature": 1, "seed": 3, **GOOD}
    (choice,) = client.post(COMPLETIONS, json=body).json()["choices"]
    assert set(choice["text"]) <= set("ab")
    assert (len(choice["text"]), choice["finish_reason"]) == (4, "stop")

"""Requests made from the served OpenAPI description, right ones and wrong ones, many of each.

Whatever is asked, there is no 5xx, an error has OpenAI's form, an answer is as described, and a
request that is sent afterwards is answered as before.  The requests are the same in every run.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode

from tests.server.process import ServerProcess

CONFIG = {
    "generation": {"deterministic": True, "database": "none"},
    "max-stream-events": 10_000,  # a stream is read to its end
}
NUM_EXAMPLES = 25
"""Random requests of each kind to each endpoint with a body."""
NUM_EDGES = 250
"""Most requests of each kind at the edges of what an endpoint describes."""
TIMEOUT_S = 60
CANARY = {"prompt": "the canary", "max_tokens": 12, "temperature": 0, "logprobs": 1}
# Of the error object; `code` and `param` may be null, but are there.
ERROR_FIELDS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def api(server: ServerProcess) -> Any:
    config = schemathesis.Config.from_dict(CONFIG)
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)


@pytest.fixture(autouse=True)
def canary(client: httpx.Client) -> Iterator[None]:
    """The same request before and after each test has the same answer."""
    before = ask_canary(client)
    yield
    assert ask_canary(client) == before


def ask_canary(client: httpx.Client) -> Any:
    response = client.post("/v1/completions", json=CANARY)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def operations(api: Any, method: str) -> list[Any]:
    found = [result.ok() for result in api.get_all_operations()]
    chosen = [operation for operation in found if operation.method == method]
    assert chosen
    return chosen


def edges(api: Any, operation: Any, mode: GenerationMode) -> Iterator[Any]:
    """Requests whose values are at the edges of what is described, or just beyond."""
    settings = api.config.generation_for(operation=operation)
    cases = api.iter_coverage_cases(operation, generation_modes=[mode], generation_config=settings)
    return itertools.islice(cases, NUM_EDGES)


def send(case: Any) -> int:
    """Send a request, check what every answer must be, and say which status it had."""
    response = case.call(timeout=TIMEOUT_S)
    assert response.status_code < 500, (case.body, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error.keys() == ERROR_FIELDS, error
        assert isinstance(error["message"], str)
        assert error["message"]
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.status_code_conformance,
        schemathesis.checks.content_type_conformance,
    ]
    if response.headers["content-type"][0].startswith("text/event-stream"):
        check_events(response.text)
    else:
        checks.append(schemathesis.checks.response_schema_conformance)
    case.validate_response(response, checks=checks)
    return response.status_code


def check_events(text: str) -> None:
    """A stream is JSON objects without an error, and ends once."""
    *events, end, nothing = text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    for event in events:
        assert "error" not in json.loads(event.removeprefix("data: ")), event


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_random_bodies(api: Any, mode: GenerationMode) -> None:
    for operation in operations(api, "post"):

        @settings(
            max_examples=NUM_EXAMPLES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            send(case)

        check()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_edges_of_the_described_values(api: Any, mode: GenerationMode) -> None:
    for operation in operations(api, "post"):
        for case in edges(api, operation, mode):
            send(case)


@pytest.mark.parametrize(
    ("path", "filled"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_edges_of_one_field_of_a_request_that_is_right_otherwise(
    api: Any, path: str, filled: dict[str, Any]
) -> None:
    """The least that is described, such as no message at all, is refused before the rest is seen:
    with something to answer in its place, the other fields' edges reach the engine."""
    statuses = Counter()
    for mode in GenerationMode:
        for case in edges(api, api[path]["post"], mode):
            if isinstance(case.body, dict) and case.method.lower() == "post":
                for name, value in {**filled, "max_tokens": 8}.items():
                    case.body[name] = case.body.get(name) or value
                statuses[send(case)] += 1
    assert statuses[200] > 50
    assert statuses[400] > 50


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_what_is_only_read(api: Any, mode: GenerationMode) -> None:
    for operation in operations(api, "get"):
        for case in edges(api, operation, mode):
            send(case)

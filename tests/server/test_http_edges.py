"""Clients that speak HTTP in unusual ways, and many at once (the untimed part of B47)."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.process import ServerProcess
from tests.server.requests import COMPLETIONS, ask, canary

BODY = json.dumps({"prompt": "hello", "max_tokens": 3, "temperature": 0}).encode()
PATIENCE_S = 30


def head(*lines: bytes, version: bytes = b"1.1", length: int | None = len(BODY)) -> bytes:
    given = [b"Host: test", b"Content-Type: application/json", *lines]
    if length is not None:
        given.append(b"Content-Length: %d" % length)
    return b"\r\n".join([b"POST /v1/completions HTTP/" + version, *given, b"", b""])


@pytest.fixture
def connection(server: ServerProcess) -> Iterator[socket.socket]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        yield connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """What comes until `end` has come, or the server closes."""
    received = b""
    while end not in received:
        part = connection.recv(65536)
        if not part:
            break
        received += part
    return received


def test_http_1_0_closes_after_the_answer(connection: socket.socket) -> None:
    connection.sendall(head(version=b"1.0") + BODY)
    received = read_until(connection, b"never")
    assert received.startswith(b"HTTP/1.1 200")
    assert b'"usage"' in received


def test_pipelined_requests_are_answered_in_order(connection: socket.socket) -> None:
    first = json.dumps({"prompt": "a", "max_tokens": 60, "ignore_eos": True}).encode()
    connection.sendall(head(length=len(first)) + first + head() + BODY)
    received = read_until(connection, b'"completion_tokens":3')  # of the second
    assert received.count(b"HTTP/1.1 200") == 2
    assert received.index(b'"completion_tokens":60') < received.index(b'"completion_tokens":3')


def test_expect_continue(connection: socket.socket) -> None:
    connection.sendall(head(b"Expect: 100-continue"))
    assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 100")
    connection.sendall(BODY)
    assert read_until(connection, b'"usage"').startswith(b"HTTP/1.1 200")


def test_a_body_in_pieces(connection: socket.socket) -> None:
    pieces = [BODY[:7], BODY[7:], b""]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    connection.sendall(head(b"Transfer-Encoding: chunked", length=None) + chunks)
    assert read_until(connection, b'"usage"').startswith(b"HTTP/1.1 200")


def test_one_connection_serves_many(connection: socket.socket) -> None:
    for _ in range(5):
        connection.sendall(head() + BODY)
        assert read_until(connection, b"}}}").startswith(b"HTTP/1.1 200")


def test_what_is_not_http_is_refused(connection: socket.socket, client: httpx.Client) -> None:
    before = canary(client)
    connection.sendall(b"\x00\x01\x02 nonsense\r\n\r\n")
    assert read_until(connection, b"never").startswith(b"HTTP/1.1 400")
    assert canary(client) == before


def test_a_client_that_leaves_in_the_middle_of_its_body(
    server: ServerProcess, connection: socket.socket, client: httpx.Client
) -> None:
    before = canary(client)
    connection.sendall(head(length=1000) + b"{")
    connection.close()
    assert canary(client) == before
    assert "ClientDisconnect" not in server.log


def test_many_clients_at_once_beside_idle_connections(
    server: ServerProcess, client: httpx.Client
) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    idle = [socket.create_connection((host, int(port)), PATIENCE_S) for _ in range(100)]
    alone = ask(client, COMPLETIONS, **json.loads(BODY))["choices"][0]["text"]

    def one(_: int) -> str:
        with server.client() as own:
            return str(ask(own, COMPLETIONS, **json.loads(BODY))["choices"][0]["text"])

    try:
        with ThreadPoolExecutor(64) as pool:
            assert set(pool.map(one, range(192))) == {alone}
    finally:
        for connection in idle:
            connection.close()

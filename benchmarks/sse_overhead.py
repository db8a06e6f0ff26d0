"""What the server adds to the engine: the same requests through `LLM.generate` and over HTTP.

    python -m benchmarks.sse_overhead                  # 32 streams of 128 tokens, the demo model
    python -m benchmarks.sse_overhead --json sse.json

Both run on this machine and in one process each, in turn, several rounds; the result is the median
of the rounds' ratios.  A server stands beside its engine's twin without HTTP, and a client does
nothing but read: it looks for the end of each stream only, and counts the tokens afterwards.  So
what the server adds is tokenisation, HTTP, JSON, the events, and the client's reads.  Run it on a
machine that does nothing else.  Exit code 1 if the ratio is above the bound.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.served import Served, serve
from jaxserve import LLM, SamplingParams

MAX_RATIO = 1.10
TEXT = "The history of measuring time begins with shadows, water and sand, and "


def prompts(count: int, round_number: int) -> list[str]:
    """Different ones in every round, so that no prefix is cached on either side."""
    return [f"Round {round_number}, text {n}. {TEXT}" for n in range(count)]


def time_engine(llm: LLM, texts: list[str], max_tokens: int) -> float:
    """Seconds of the engine alone."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(texts, params)
    seconds = time.perf_counter() - start
    assert all(len(output.outputs[0].token_ids) == max_tokens for output in outputs)
    return seconds


def time_server(served: Served, texts: list[str], max_tokens: int) -> float:
    """Seconds from the first request sent to the last stream's end."""
    address = urlsplit(served.url)
    assert address.hostname is not None
    assert address.port is not None
    connections = []
    for _ in texts:
        connection = socket.create_connection((address.hostname, address.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections.append(connection)
    requests = [_request(address.netloc, text, max_tokens) for text in texts]
    start = time.perf_counter()
    for connection, request in zip(connections, requests, strict=True):
        connection.sendall(request)
    streams = _read(connections)
    seconds = time.perf_counter() - start
    for stream in streams:
        _check(stream, max_tokens)
    return seconds


def _request(host: str, text: str, max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _read(connections: list[socket.socket]) -> list[bytes]:
    """Read every connection to its end."""
    received = {connection: bytearray() for connection in connections}
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                data = connection.recv(1 << 16)
                received[connection] += data
                if not data:
                    selector.unregister(connection)
                    connection.close()
    return [bytes(received[connection]) for connection in connections]


def _check(stream: bytes, max_tokens: int) -> None:
    """A stream is whole if its usage says so and it says that it is."""
    assert stream.startswith(b"HTTP/1.1 200"), stream[:500]
    assert b"data: [DONE]" in stream, stream[-500:]
    assert f'"completion_tokens":{max_tokens}'.encode() in stream, stream[-500:]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both, round by round."""
    engine: list[float] = []
    server: list[float] = []
    slots = ("--max-num-seqs", f"{options.streams}")
    with serve(*slots, model=options.model) as served:
        llm = LLM(options.model, max_num_seqs=options.streams)
        for number in range(options.rounds + 1):
            texts = prompts(options.streams, number)
            if number % 2:
                engine.append(time_engine(llm, texts, options.max_tokens))
            server.append(time_server(served, texts, options.max_tokens))
            if number % 2 == 0:  # each is first in half of the rounds
                engine.append(time_engine(llm, texts, options.max_tokens))
            print(f"round {number}: engine {engine[-1]:.3f} s, server {server[-1]:.3f} s")
        llm.close()
    del engine[0], server[0]  # they have warmed both up
    ratios = [s / e for s, e in zip(server, engine, strict=True)]
    return {
        "streams": options.streams,
        "max_tokens": options.max_tokens,
        "engine_s": engine,
        "server_s": server,
        "ratios": ratios,
        "ratio": statistics.median(ratios),
        "max_ratio": MAX_RATIO,
    }


def main() -> int:
    """Measure, print, and write JSON if asked; 1 if the server costs too much."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="the demo model if absent")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    result = measure(options)
    print(f"server / engine: {result['ratio']:.3f} (bound {MAX_RATIO})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["ratio"] > MAX_RATIO else 0


if __name__ == "__main__":
    sys.exit(main())

"""Users for locust: streamed chats, with the first token and the tokens after it as events.

locust -f scripts/interop/locustfile.py --headless -u 4 -r 4 -t 10s --host http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import time

from locust import HttpUser, constant, events, task

MAX_TOKENS = 16


class Reader(HttpUser):
    """Asks, reads to the end, and asks again at once."""

    wait_time = constant(0)

    def on_start(self) -> None:
        """Find out what the model is called."""
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def chat(self) -> None:
        """One streamed answer; TTFT and TPOT are events of their own, in milliseconds."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "Name three colours."}],
            "max_completion_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        first, usage = None, None
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, catch_response=True
        ) as response:
            # Line by line as they come: the default would wait for 512 bytes.
            for raw in response.iter_lines(chunk_size=1):
                line = raw.decode()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage") or usage
                if first is None and any(c["delta"].get("content") for c in chunk["choices"]):
                    first = time.perf_counter()
            if usage is None or usage["completion_tokens"] != MAX_TOKENS:
                response.failure(f"usage {usage}, not {MAX_TOKENS} tokens")
                return
            response.success()
        end = time.perf_counter()
        if first is not None:
            fire("TTFT", first - start)
            fire("TPOT", (end - first) / (MAX_TOKENS - 1))


def fire(name: str, seconds: float) -> None:
    """Report a time as locust reports requests."""
    events.request.fire(
        request_type="SSE",
        name=name,
        response_time=1000 * seconds,
        response_length=0,
        exception=None,
        context={},
    )

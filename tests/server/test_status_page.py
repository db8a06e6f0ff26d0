"""The page at / stands alone, and shows what the server says; in a browser where there is one."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from jaxserve.observer import StepRecord
from jaxserve.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxserve.server.engine_state import EngineState
from jaxserve.server.metrics import Metrics

PAGE = files("jaxserve.server").joinpath("static", "index.html").read_text(encoding="utf-8")
VOID = {"meta", "link", "input", "br", "hr", "img"}
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Elements(HTMLParser):
    """Elements with their attributes and text; refuses what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.found.append((tag, values))
        for _, name in self._open:
            if name:
                key = f"{name}/{tag}.{values.get('class') or ''}"
                self.counts[key] = self.counts.get(key, 0) + 1
        if tag not in VOID:
            self._open.append((tag, values.get("id")))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name:
                self.text[name] = self.text.get(name, "") + data


def script() -> str:
    found = re.search(r"<script>(.*)</script>", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def filled() -> Metrics:
    """Half of the slots in use, and something of everything."""
    state = EngineState(
        num_running=4,
        num_slots=8,
        num_waiting=3,
        num_pages=40,
        num_pages_held=10,
        num_pages_cached=5,
        page_size=16,
        num_preemptions=1,
        discarded_tokens=2,
        prefix_query_tokens=100,
        prefix_hit_tokens=25,
        num_compilations=0,
    )
    metrics = Metrics("tiny <b>model</b>", lambda: state)
    metrics.on_step(StepRecord("decode8", 4, 0.04, 0.004, 0, 16, 32, 4, 3))
    metrics.on_step(StepRecord("decode16", 1, 0.02, 0.001, 0, 12, 16, 4, 3))
    metrics.on_tokens([0.2], [0.01, 0.01, 0.0])
    sample = CompletionOutput(0, "", [1, 2, 3, 4], None, None, "stop")
    times = RequestMetrics(0.0, queue_time=0.1, ttft=0.2, itl=[0.01], e2e=0.5)
    metrics.on_end(RequestOutput("r", None, [1], None, [sample], True, times))
    return metrics


class TestStructure:
    def test_the_page_is_well_formed_and_names_are_unique(self) -> None:
        ids = [values["id"] for _, values in Elements(PAGE).found if "id" in values]
        assert len(ids) == len(set(ids))

    def test_nothing_is_loaded_from_elsewhere(self) -> None:
        assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|import\(", PAGE)
        for tag, values in Elements(PAGE).found:
            assert values.get("src") is None
            if tag == "link":
                assert values["href"] == "data:,"

    def test_the_script_writes_to_elements_that_are_there(self) -> None:
        ids = {values["id"] for _, values in Elements(PAGE).found if "id" in values}
        used = set(re.findall(r'(?:byId|say|cells|chart|rows|bars)\("([\w-]+)"', script()))
        assert used
        assert used <= ids
        assert {f"{name}-ticks" for name in ("ttft", "itl")} <= ids

    def test_the_script_reads_what_the_snapshot_has(self) -> None:
        snapshot = filled().snapshot()
        read = set(re.findall(r"\bnow\.([a-z_]+)", script())) - {"time"}
        assert read <= snapshot.keys()
        counters = set(re.findall(r"\bcounters\.([a-z_]+)", script()))
        assert counters <= snapshot["counters"].keys()
        for part in ("slots", "pages"):
            names = set(re.findall(rf"\bnow\.{part}\.([a-z_]+)", script()))
            assert names <= snapshot[part].keys()

    def test_text_is_never_taken_for_markup(self) -> None:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write", script())

    def test_it_follows_the_readers_color_scheme(self) -> None:
        assert "color-scheme: light dark" in PAGE


@pytest.fixture
def serve() -> Iterator[Any]:
    """Serves the page with a status function; gives its address."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(status: Any) -> str:
        app = Starlette(
            routes=[
                Route("/", lambda request: HTMLResponse(PAGE)),
                Route("/server_status", status),
            ]
        )
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def rendered(address: str, profile: Path) -> Elements:
    """The page after some seconds of the browser's own, virtual time."""
    assert BROWSER is not None
    run = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *(f"--user-data-dir={profile}", "--virtual-time-budget=4000", address),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return Elements(re.sub(r"<script>.*</script>", "", run.stdout, flags=re.DOTALL))


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
class TestInABrowser:
    def test_it_shows_what_the_server_says(self, serve: Any, tmp_path: Path) -> None:
        metrics = filled()

        def status(request: Request) -> JSONResponse:
            metrics.on_tokens([], [0.02] * 5)  # something goes on between two polls
            return JSONResponse(metrics.snapshot())

        page = rendered(serve(status), tmp_path)
        assert page.text["model"] == "tiny <b>model</b>"
        assert page.text["state"] == "live"
        assert page.text["slots-text"] == "4 of 8 in use"
        assert page.counts["slots/i.used"] == 4
        assert page.counts["slots/i."] == 4
        assert page.counts["pages/i.used"] == 10
        assert page.counts["pages/i.kept"] == 5
        assert page.counts["pages/i."] == 25
        assert page.text["queue"] == "3"
        assert page.text["compilations"] == "0"
        assert page.counts["itl/i."] >= 10
        assert page.counts["use-chart/path.one"] == 1
        assert page.text["steps"].startswith("decode8")
        assert "prefix cache hits25 %" in page.text["counts"]
        rate = page.text["generation-rate"].replace(",", "")
        assert float(rate) > 0

    def test_a_server_that_fails_is_said_to(self, serve: Any, tmp_path: Path) -> None:
        page = rendered(serve(lambda request: JSONResponse({}, status_code=503)), tmp_path)
        assert page.text["state"] == "no answer (status 503)"

    def test_before_the_engine_is_there_the_page_holds(self, serve: Any, tmp_path: Path) -> None:
        metrics = Metrics("starting")
        page = rendered(serve(lambda request: JSONResponse(metrics.snapshot())), tmp_path)
        assert page.text["state"] == "live"
        assert page.text["queue"] == "\N{EN DASH}"

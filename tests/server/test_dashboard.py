"""The Grafana dashboard asks for metrics, labels and samples that a server exposes."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.observer import StepRecord
from jaxserve.server.engine_state import PREFIX, EngineState
from jaxserve.server.metrics import Metrics

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "grafana" / "jaxserve.json").read_text(encoding="utf-8")
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels of every sample that a server has exposed once it has served something."""
    metrics = Metrics("m", lambda: EngineState(1, 8, 0, 10, 1, 1, 16, 0, 0, 0, 0, 0))
    metrics.on_step(StepRecord("decode8", 1, 0.01, 0.001, 0, 8, 8, 8, 0))
    metrics.count_response("GET", "/", 200)
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_what_is_exposed(query: str, labels: dict[str, set[str]]) -> None:
    names = re.findall(rf"{PREFIX}\w+|process_\w+", query)
    assert names
    assert set(names) <= labels.keys()
    known = set().union(*(labels[name] for name in names)) | SCRAPED
    for grouped in re.findall(r"by \(([^)]*)\)", query):
        assert {label.strip() for label in grouped.split(",")} <= known
    for matcher in re.findall(r"\{([^}]*)\}", query):
        assert re.match(r"\w+", matcher)[0] in known  # type: ignore[index]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_is_balanced_and_rates_are_of_counters(query: str) -> None:
    for opening, closing in ("()", "[]", "{}"):
        assert query.count(opening) == query.count(closing)
    for name in re.findall(rf"(?:rate|increase)\(({PREFIX}\w+)", query):
        assert name.endswith(("_total", "_bucket", "_sum", "_count"))


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_legends_use_labels_that_the_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel.get("targets", ()):
        kept = {
            label.strip()
            for grouped in re.findall(r"by \(([^)]*)\)", target["expr"])
            for label in grouped.split(",")
        }
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert label in kept | (SCRAPED if not kept else set())


def test_panels_have_a_place_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = [panel["gridPos"] for panel in PANELS]
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_below
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_the_data_source_is_asked_for_at_the_import() -> None:
    names = {f"${{{asked['name']}}}" for asked in DASHBOARD["__inputs"]}
    used = {panel["datasource"]["uid"] for panel in PANELS if "datasource" in panel}
    assert used == names


def test_what_must_never_happen_is_on_it() -> None:
    asked = " ".join(QUERIES)
    for name in ("xla_compilations_total", "num_preemptions_total", "num_requests_waiting"):
        assert f"{PREFIX}{name}" in asked

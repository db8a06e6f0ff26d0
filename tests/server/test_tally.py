"""A tally exposes what the library's own histogram exposes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from jaxserve.server.metrics import ITL_BUCKETS
from jaxserve.server.tally import Tally

NAME, DOC = "jaxserve:gap_seconds", "Gaps."


def exposed(registry: CollectorRegistry) -> list[str]:
    """Lines of the exposition, but for when a series was made."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_it_exposes_what_a_histogram_does() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally(NAME, DOC, {"model_name": 'a "model"'}, ITL_BUCKETS)
    ours.register(tally)
    histogram = Histogram(NAME, DOC, ("model_name",), buckets=ITL_BUCKETS, registry=theirs)
    child = histogram.labels('a "model"')
    assert exposed(ours) == exposed(theirs)
    for values in ([0.0, 0.001, 0.0011], [], [0.5, 0.5, 79.0], [80.0, 81.0, 1e9]):
        tally.add(values)
        for value in values:
            child.observe(value)
        assert exposed(ours) == exposed(theirs)

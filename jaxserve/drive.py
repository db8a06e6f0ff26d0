"""Step an engine and hand over the requests that finish.

Knows `Engine.step/is_finished/take`.  Does not know where requests come from or where answers go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jaxserve.outputs import Delta, RequestOutput

if TYPE_CHECKING:
    from jaxserve.engine import Engine


def take_finished(engine: Engine, deltas: Iterable[Delta]) -> Iterator[RequestOutput]:
    """Take the requests whose last sample ended in a step.

    Args:
        engine: forgets each request that is yielded.
        deltas: what `engine.step` returned.
    """
    ended = dict.fromkeys(d.request_id for d in deltas if d.finish_reason is not None)
    for request_id in ended:
        if engine.is_finished(request_id):
            yield engine.take(request_id)


def run_all(engine: Engine) -> Iterator[RequestOutput]:
    """Step until nothing is left, yielding requests in the order in which they finish."""
    while engine.has_work:
        yield from take_finished(engine, engine.step())

"""The engine's loop on a thread of its own.

Knows when to step and when to rest.  Between two steps it runs what other threads have asked for,
so that nothing else ever touches the engine.  Does not know asyncio.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxserve.engine import Engine
    from jaxserve.outputs import Delta

log = logging.getLogger(__name__)

Job = Callable[[], object]


class EngineThread:
    """Steps an engine while it has work, and runs jobs between the steps.

    An exception out of a step or a job is the engine's death: it is kept in `error`, `on_death`
    hears of it, and no further job is run.
    """

    def __init__(
        self,
        engine: Engine,
        on_deltas: Callable[[list[Delta]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """Prepare; nothing runs before `start`.

        Args:
            engine: from now on this thread's alone.
            on_deltas: called on the thread with what a step gave, if anything.
            on_death: called on the thread after a failure.
        """
        self.error: BaseException | None = None
        self._engine = engine
        self._on_deltas = on_deltas
        self._on_death = on_death
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._closing = False
        # A daemon: a program that forgets to close must still be able to end.
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Jobs will be run: the thread was started, has not been closed and has not failed."""
        return self._thread.is_alive() and self.error is None and not self._closing

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def do(self, job: Job) -> None:
        """Have a job run between two steps; any thread may ask."""
        self._jobs.put(job)

    def close(self, last: Job) -> None:
        """Run a last job, let the steps in flight land and end; returns when that is done."""
        if self._thread.is_alive():
            self._jobs.put(last)
            self._jobs.put(self._stop)
            self._thread.join()

    def _stop(self) -> None:
        self._closing = True

    def _run(self) -> None:
        try:
            while not self._closing:
                self._work()
            while self._engine.has_work:
                self._engine.step()
        except BaseException as error:
            log.critical("the engine has failed; no request can be served any more", exc_info=error)
            self.error = error
            self._on_death(error)

    def _work(self) -> None:
        """Run the jobs that wait, then one step; with neither, wait for a job."""
        if not self._engine.has_work:
            self._jobs.get()()
        while not self._closing:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            job()
        if self._engine.has_work and not self._closing:
            deltas = self._engine.step()
            if deltas:
                self._on_deltas(deltas)

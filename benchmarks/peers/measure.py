"""The turns: every engine does an item once, then every engine again, and so on.

One engine computes at a time; the others are stopped.  Does not know what the engines are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers import proc
from benchmarks.peers.engines import FEW_REPEATS, Engine
from benchmarks.peers.process import Answer, Worker, WorkerError
from benchmarks.peers.summary import agreement
from benchmarks.peers.work import Item, Request

QUIET = 0.05
"""Largest share of the machine that others may take in a turn that counts as quiet."""
_WARM_TOKENS = 16
"""Of each request of ragged work before it is timed: most of the cache has been touched then."""

Tokens = list[list[int]]


@dataclass(frozen=True)
class Turn:
    """One engine's one repeat of one item."""

    engine: str
    item: str
    repeat: int
    seconds: float
    """For the whole item."""
    first_s: float | None
    """For one token of each request, in a call of its own; fixed work only."""
    tokens_per_s: float
    """Output tokens of ragged work; of fixed work, decoded tokens without the first ones."""
    others: float
    """Share of the machine that went to anything but this run."""
    own_cores: float
    """Cores that this run kept busy."""

    @property
    def quiet(self) -> bool:
        """Whether the machine was ours."""
        return self.others <= QUIET


@dataclass
class Results:
    """What a run has found so far."""

    turns: list[Turn] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Engine -> what it says about itself."""
    failed: dict[str, str] = field(default_factory=dict)
    """Engine -> why it stopped taking part."""
    agreement: list[dict[str, Any]] = field(default_factory=list)
    """Per engine and item, against the reference."""
    memory: list[dict[str, Any]] = field(default_factory=list)
    """Per engine and ragged item."""


class Meter:
    """Whose the machine was between entering and leaving.  A context manager."""

    def __enter__(self) -> Meter:
        self._busy, self._own = proc.busy_s(), proc.tree_cpu_s(os.getpid())
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        wall = time.perf_counter() - self._start
        own = proc.tree_cpu_s(os.getpid()) - self._own
        busy = proc.busy_s() - self._busy
        self.own_cores = own / wall
        self.others = max(0.0, (busy - own) / (wall * (os.cpu_count() or 1)))


class Group:
    """Engines of one number of slots, loaded side by side, and the items that they do in turns.

    A context manager: the engines are there inside, and ended after it.

    Args:
        engines: in the order of their turns.
        start: starts an engine.
        results: is added to.
        say: tells the user.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        start: Callable[[Engine], Worker],
        results: Results,
        say: Callable[[str], None],
    ) -> None:
        self._results = results
        self._say = say
        self._engines = [engine for engine in engines if engine.name not in results.failed]
        self._start = start
        self._workers: dict[Engine, Worker] = {}

    def __enter__(self) -> Group:
        try:
            for engine in self._engines:
                self._load(engine)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()

    def tokens(self, requests: Sequence[Request]) -> Tokens:
        """What the only engine of a group generates; empty if it failed."""
        for engine in list(self._workers):
            answer = self._try(engine, lambda worker: _generate(worker, requests))
            return answer.tokens if answer is not None else []
        return []

    def measure(self, item: Item, repeats: int, few: int, reference: Tokens) -> None:
        """Do an item in turns.

        Args:
            item: what to do.
            repeats: of each engine.
            few: of the slow ones.
            reference: the tokens to compare with; empty for none.
        """
        for engine in list(self._workers):
            self._try(engine, lambda worker: _warm(worker, item))
        first: dict[Engine, Tokens] = {}
        for repeat in range(repeats):
            for engine in list(self._workers):
                if engine.family in FEW_REPEATS and repeat >= few:
                    continue
                answer = self._turn(engine, item, repeat)
                if answer is not None:
                    same = first.setdefault(engine, answer.tokens) == answer.tokens
                    if not same:
                        self._say(f"{engine.name}: repeat {repeat + 1} gave other tokens")
        for engine, tokens in first.items():
            self._compare(engine, item, tokens, reference)
            self._memory(engine, item)

    def finish(self) -> None:
        """Ask every engine for what it has to say at the end."""
        for engine in list(self._workers):
            facts = self._try(engine, lambda worker: worker.facts_at_end())
            self._results.facts[engine.name].update(facts or {})

    def _load(self, engine: Engine) -> None:
        self._say(f"loading {engine.name}")
        worker = self._start(engine)
        self._workers[engine] = worker
        try:
            facts = worker.ready()
            facts["peak_rss_at_ready_bytes"] = proc.peak_rss_bytes(worker.pid)
            facts["idle_cores"] = worker.idle_cores()
            worker.pause()
        except WorkerError as error:
            self._drop(engine, error)
        else:
            self._results.facts.setdefault(engine.name, facts)

    def _turn(self, engine: Engine, item: Item, repeat: int) -> Answer | None:
        def work(worker: Worker) -> tuple[Turn, Answer]:
            worker.generate([item.requests[0].prompt], [1])  # wakes threads, refills caches
            first = None
            with Meter() as meter:
                if item.kind == "fixed":
                    first = _generate(worker, [Request(r.prompt, 1) for r in item.requests])
                answer = _generate(worker, item.requests)
            first_s = None if first is None else first.seconds
            rate = tokens_per_s(item, answer.seconds, first_s)
            names = (engine.name, item.name, repeat)
            turn = Turn(*names, answer.seconds, first_s, rate, meter.others, meter.own_cores)
            return turn, answer

        if item.kind == "ragged" and repeat == 0:
            proc.reset_peak_rss(self._workers[engine].pid)
        found = self._try(engine, work)
        if found is None:
            return None
        turn, answer = found
        self._results.turns.append(turn)
        self._say(
            f"{item.name:9}  {repeat + 1}  {engine.name:24} {turn.seconds:7.2f} s "
            f"{turn.tokens_per_s:8.1f} tokens/s  others {turn.others:.0%}"
        )
        return answer

    def _try(self, engine: Engine, work: Callable[[Worker], Any]) -> Any:
        """Let an engine run for one piece of work; None if it fails, and it is out then."""
        worker = self._workers[engine]
        try:
            worker.resume()
            found = work(worker)
            worker.pause()
        except WorkerError as error:
            self._drop(engine, error)
            return None
        return found

    def _drop(self, engine: Engine, error: WorkerError) -> None:
        self._say(f"{engine.name} is out: {error}")
        self._results.failed[engine.name] = str(error)
        self._workers.pop(engine).close()

    def _compare(self, engine: Engine, item: Item, tokens: Tokens, reference: Tokens) -> None:
        if reference:
            found = agreement(tokens, reference[: len(tokens)])
            self._results.agreement.append({"engine": engine.name, "item": item.name, **found})

    def _memory(self, engine: Engine, item: Item) -> None:
        if item.kind == "ragged" and engine in self._workers:
            peak = proc.peak_rss_bytes(self._workers[engine].pid)
            self._results.memory.append(
                {"engine": engine.name, "item": item.name, "peak_rss_bytes": peak}
            )


def tokens_per_s(item: Item, seconds: float, first_s: float | None) -> float:
    """Output tokens per second; without the first token of each request where its time is known.

    All but the first of fixed work are decode steps, so their rate is that of decoding.
    """
    if first_s is None:
        return item.output_tokens / seconds
    return (item.output_tokens - item.slots) / (seconds - first_s)


def _generate(worker: Worker, requests: Sequence[Request]) -> Answer:
    wanted = [request.max_tokens for request in requests]
    answer = worker.generate([request.prompt for request in requests], wanted)
    counts = [len(tokens) for tokens in answer.tokens]
    if counts != wanted:
        raise WorkerError(f"{sum(counts)} tokens instead of {sum(wanted)}")
    return answer


def _warm(worker: Worker, item: Item) -> None:
    _generate(worker, [Request(r.prompt, min(r.max_tokens, _WARM_TOKENS)) for r in item.requests])

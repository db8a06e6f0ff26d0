"""Fair share of the device among keys, such as users or tenants.

Knows what each key has received.  Does not know pages or budgets: who is next may still have to
wait for room.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain

from scheduler.queues import RankHeap
from scheduler.sequence import Rank, Sequence

OUTPUT_WEIGHT = 2
"""An output token counts as much service as so many prompt tokens (as in the paper)."""


class FairQueue:
    """Waiting sequences; the next is the most senior one of the key that was served least.

    Each key has a counter of the tokens that it was served (VTC, Sheng et al., OSDI '24,
    arXiv:2401.00588).  A key that comes to wait is lifted to the least counter of those that wait
    already, or, where none does, to that of the key that waited last: nobody saves up while away.
    So of two keys that both wait all the time neither gets ahead by more than what runs at once,
    whatever the numbers of their requests.

    All methods but iteration take time logarithmic in the number of sequences and keys.  A
    counter only grows, so an entry of the heap of keys is a lower bound, brought up to date when
    it comes to the top; of these there are no more than keys that were served meanwhile.
    """

    def __init__(self) -> None:
        self._queues: dict[str, RankHeap] = {}  # of the keys that wait
        self._served: dict[str, float] = {}
        self._order: list[tuple[float, int, str]] = []  # one per key of `_ordered`
        self._ordered: set[str] = set()
        self._num_pushed = 0
        self._level = 0.0  # the counter of the key that was the last to stop waiting
        self._num_waiting = 0
        self._num_started = 0
        self._most_counters = 1024

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        waiting = chain.from_iterable(self._queues.values())
        return iter(sorted(waiting, key=lambda seq: seq.rank))

    @property
    def first(self) -> Sequence:
        """The most senior sequence of the key that was served least."""
        return self._queues[self._least_served()].first

    def add(self, seq: Sequence) -> None:
        """Let `seq` wait."""
        if seq.key not in self._queues:
            self._begin(seq.key)
        self._queues[seq.key].add(seq)
        self._num_waiting += 1

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, first or not."""
        queue = self._queues[seq.key]
        queue.remove(seq)
        self._num_waiting -= 1
        if not queue:
            del self._queues[seq.key]
            self._level = self._served[seq.key]

    def rank_of_admitted(self, seq: Sequence) -> Rank:
        """From its first admission on by the order of those: who came first may be passed over."""
        first, is_new, _ = seq.rank
        if not is_new:
            return seq.rank
        self._num_started += 1
        return first, 0, self._num_started

    def serve(self, key: str, prompt_tokens: int, output_tokens: int) -> None:
        """Count what a key is being given."""
        before = self._served.get(key, self._level)
        self._served[key] = before + prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def service(self, key: str) -> float:
        """The counter of a key, in prompt tokens."""
        return self._served.get(key, self._level)

    def check(self) -> None:
        """Assert that every key that waits is in order, and that none waits with nothing."""
        assert self._num_waiting == sum(map(len, self._queues.values()))
        assert self._queues.keys() <= self._ordered == {key for _, _, key in self._order}
        assert len(self._order) == len(self._ordered)
        for key, queue in self._queues.items():
            assert queue, f"key {key!r} waits with no sequence"
            queue.check()
        for served, _, key in self._order:
            assert key not in self._queues or served <= self._served[key]

    def _begin(self, key: str) -> None:
        """A key that did not wait comes to wait."""
        level = self._served[self._least_served()] if self._queues else self._level
        self._served[key] = max(self._served.get(key, 0.0), level)
        self._queues[key] = RankHeap()
        if key not in self._ordered:
            self._push(key)
        if len(self._served) > self._most_counters:
            self._forget(level)

    def _least_served(self) -> str:
        """The key that waits and was served least; the one that has waited longest for that."""
        while True:
            served, _, key = self._order[0]
            if key in self._queues and served == self._served[key]:
                return key
            heapq.heappop(self._order)
            self._ordered.remove(key)
            if key in self._queues:
                self._push(key)

    def _push(self, key: str) -> None:
        self._num_pushed += 1
        heapq.heappush(self._order, (self._served[key], self._num_pushed, key))
        self._ordered.add(key)

    def _forget(self, level: float) -> None:
        """Drop the counters that mean nothing: of keys that would be lifted above them."""
        self._served = {
            key: served
            for key, served in self._served.items()
            if served > level or key in self._queues
        }
        self._most_counters = 1024 + 2 * len(self._served)

"""Who has slots and pages: giving them, taking them back, and what is kept of them elsewhere.

Knows slots, pages, the prefix cache and the swap space.  Does not know budgets or whose turn it
is: the scheduler asks, and what has to move for it is collected until the plan is made.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import ScheduledTokens
from scheduler.prefix_cache import PrefixCache
from scheduler.queues import SeniorityQueue, WaitingQueue
from scheduler.sequence import Sequence, Status
from scheduler.swap import Swapper
from scheduler.swap_space import PageCopy, SwapSpace


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start."""

    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions whose pages were kept on the host; the others are recomputed."""
    discarded_tokens: int = 0
    """Sampled tokens that came after what ended their sequence."""
    prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache at first admissions."""
    prefix_hit_tokens: int = 0
    """Those of them that it had."""


@dataclass(slots=True)
class Moves:
    """What a plan in the making has displaced."""

    preempted: list[Sequence] = field(default_factory=list)
    swapped_out: list[PageCopy] = field(default_factory=list)
    swapped_in: list[PageCopy] = field(default_factory=list)


class Residents:
    """The running sequences, and the only owner of slots, pages and host pages.

    Args:
        config: limits of a step and of a sequence.
        pool: the pages, all free.
        waiting: where preempted sequences go.
        space: host pages for them.
        stats: counts what is preempted, swapped and found in the prefix cache.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        waiting: WaitingQueue,
        space: SwapSpace,
        stats: SchedulerStats,
    ) -> None:
        self.pool = pool
        self.running = SeniorityQueue()
        self.waiting = waiting
        self.stats = stats
        self._config = config
        self._prefix_cache = PrefixCache(pool)
        self._swapper = Swapper(config.preemption, config.page_cost_tokens, space)
        self._free_slots = list(range(config.max_num_seqs))  # a heap
        self._moves = Moves()

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody has."""
        return len(self._free_slots)

    @property
    def any_preempted(self) -> bool:
        """Whether the plan in the making has preempted a sequence."""
        return bool(self._moves.preempted)

    def moves(self) -> Moves:
        """What was displaced since the last call."""
        moves, self._moves = self._moves, Moves()
        return moves

    def take(self, seq: Sequence, count: int) -> ScheduledTokens | None:
        """Plan `count` tokens of a running sequence; None if it had to yield instead."""
        num_missing = self.pool.num_missing(seq.block_table, seq.num_computed + count)
        if num_missing > 0 and not self._make_room(seq, num_missing):
            return None
        return self.advance(seq, count, num_missing)

    def advance(self, seq: Sequence, count: int, num_new_pages: int) -> ScheduledTokens:
        """Plan the next `count` tokens of a sequence and count them as computed."""
        assert seq.slot is not None
        start, first_new_page = seq.num_computed, len(seq.block_table)
        new_pages: tuple[int, ...] = ()
        if num_new_pages > 0:
            new_pages = tuple(self.pool.allocate(num_new_pages))
            seq.block_table.extend(new_pages)
        is_decode = start >= seq.prefill_end
        samples = start + count >= seq.prefill_end and seq.max_tokens > 0
        entry = ScheduledTokens(
            seq, seq.slot, start, count, samples, is_decode, first_new_page, new_pages
        )
        seq.num_computed += count
        seq.num_in_flight += entry.num_samples
        self.waiting.serve(seq.key, 0, entry.num_samples)
        return entry

    def match(self, seq: Sequence) -> list[int]:
        """Pages of the longest prefix of a waiting sequence that is cached."""
        return self._prefix_cache.match(seq) if self._reads_cache(seq) else []

    def keep(self, seq: Sequence, start: int, end: int) -> None:
        """Offer the pages that tokens `start` to `end` have filled to the prefix cache."""
        if seq.keeps_pages:
            self._prefix_cache.keep(seq, start, end)

    def fits(self, seq: Sequence, hits: list[int], prefill_budget: int) -> bool:
        """Whether there are pages for all its tokens, even if this step computes only a chunk.

        Where budget is left, all running sequences have the pages of their prefills: no free page
        is counted on twice, and nobody is admitted only to be preempted in the middle of one.
        """
        num_pending = seq.num_tokens - max(len(hits) * self.pool.page_size, seq.num_swapped)
        if not self._config.enable_chunked_prefill and num_pending > prefill_budget:
            return False
        num_missing = self.pool.num_missing(hits, seq.num_tokens)
        return num_missing <= self.pool.num_free_beside(hits)

    def place(self, seq: Sequence, hits: list[int]) -> None:
        """Give a waiting sequence a slot and the pages of its cached prefix."""
        self.waiting.remove(seq)
        seq.rank = self.waiting.rank_of_admitted(seq)
        self.pool.share(hits)
        seq.block_table += hits
        seq.num_computed = len(hits) * self.pool.page_size
        if seq.num_swapped > 0:
            self._bring_back(seq)
        seq.is_stale = False
        seq.prefill_end = len(seq.token_ids)
        seq.keeps_pages = self._config.enable_prefix_caching
        if seq.status is Status.WAITING and self._reads_cache(seq):
            seq.num_cached = seq.num_computed
            self.stats.prefix_query_tokens += seq.num_tokens
            self.stats.prefix_hit_tokens += seq.num_cached
        seq.slot = heapq.heappop(self._free_slots)
        seq.status = Status.RUNNING
        self.running.add(seq)

    def drop(self, seq: Sequence) -> None:
        """Forget a waiting sequence, and what the host keeps of it."""
        self.waiting.remove(seq)
        self._swapper.drop(seq)

    def vacate(self, seq: Sequence) -> None:
        """Take slot and pages from a running sequence."""
        assert seq.slot is not None
        self.running.remove(seq)
        heapq.heappush(self._free_slots, seq.slot)
        self.pool.release(seq.block_table)
        seq.slot = None
        seq.keeps_pages = False
        seq.block_table.clear()
        seq.num_computed = 0

    def num_missing(self, num_steps: int) -> int:
        """Pages that the running sequences lack for so many decode steps."""
        return sum(
            self.pool.num_missing(seq.block_table, seq.num_computed + min(num_steps, seq.num_left))
            for seq in self.running
        )

    def forget_content(self) -> None:
        """Forget what all pages hold, as new weights require.

        Running sequences go on with what they have computed, so the pages that they fill from
        now on are a mixture and are not kept either.
        """
        self._prefix_cache.clear()
        for seq in self.running:
            seq.keeps_pages = False
            seq.is_stale = True
        for seq in self.waiting:
            self._swapper.drop(seq)

    def check(self) -> None:
        """Assert who owns what; linear in pages and sequences."""
        running, waiting = list(self.running), list(self.waiting)
        self.pool.check(seq.block_table for seq in running)
        slots = self._free_slots + [seq.slot for seq in running if seq.slot is not None]
        assert sorted(slots) == list(range(self._config.max_num_seqs)), f"slots {slots}"
        for seq in running:
            assert seq.status is Status.RUNNING
            assert 0 <= seq.num_in_flight <= seq.num_tokens
            assert 0 < seq.num_computed <= seq.num_tokens
            assert self.pool.num_missing(seq.block_table, seq.num_computed) == 0
        self._swapper.check(waiting)
        for seq in waiting:
            assert seq.status in (Status.WAITING, Status.PREEMPTED)
            assert seq.slot is None
            assert not seq.block_table
            assert seq.num_computed == 0

    def _make_room(self, seq: Sequence, num_pages: int) -> bool:
        """Preempt until `num_pages` are free; False if `seq` itself was the last to ask."""
        while num_pages > self.pool.num_free:
            victim = self.running.last
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _bring_back(self, seq: Sequence) -> None:
        """Give a sequence the pages it had when it was preempted, from the host."""
        num_hits = len(seq.block_table)
        if seq.num_swapped > seq.num_computed:
            num_missing = self.pool.num_missing(seq.block_table, seq.num_swapped)
            seq.block_table += self.pool.allocate(num_missing)
            seq.num_computed = seq.num_swapped
        self._moves.swapped_in += self._swapper.restore(seq, num_hits)

    def _preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to wait.

        It is recomputed later but for what stays cached, or its pages are kept on the host.
        """
        saved = self._swapper.save(seq)
        self._moves.swapped_out += saved
        self.stats.num_swaps += len(saved)
        self.vacate(seq)
        seq.status = Status.PREEMPTED
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.add(seq)
        self._moves.preempted.append(seq)

    def _reads_cache(self, seq: Sequence) -> bool:
        return self._config.enable_prefix_caching and seq.reads_prefix_cache

"""Iteration-level scheduler: which tokens of which sequences the next step computes.

Knows counts of tokens, slots and pages.  Knows no model, no array, no device and no clock, so
that a simulator can drive it in virtual time exactly as an engine does in real time.
"""

from __future__ import annotations

import heapq
from collections import abc
from dataclasses import dataclass

from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import ScheduledTokens, StepPlan, Update
from scheduler.policy import AdmissionPolicy, Continuous, SeniorityQueue, rank
from scheduler.prefix_cache import PrefixCache
from scheduler.sequence import FinishReason, Sequence, Status


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the start, or since the caller put a new one in its place."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    """Tokens looked up in the prefix cache at first admissions."""
    prefix_hit_tokens: int = 0
    """Those of them that it had."""


class Scheduler:
    """Decides at every step which sequences run and how many tokens of each.

    `add` sequences, then as long as there is work: `schedule` a plan, run it, `update` with the
    tokens it sampled.  A second plan may be scheduled before the first is updated (asynchronous
    scheduling), because a plan needs only the number of tokens, not their values: all state but
    the token ids moves when a step is scheduled, as if it had run already.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        admission: AdmissionPolicy | None = None,
    ) -> None:
        """Start idle.

        Args:
            config: limits of a step and of a sequence.
            pool: the pages, all free; the scheduler is their only owner.
            admission: when waiting sequences may join; `Continuous` if absent.

        Raises:
            ValueError: a sequence of `max_model_len` would not fit the pool even alone.
        """
        config.check_pool(pool)
        self.config = config
        self.pool = pool
        self.waiting = SeniorityQueue()
        self.running = SeniorityQueue()
        self.stats = SchedulerStats()
        self._admission = Continuous() if admission is None else admission
        self._prefix_cache = PrefixCache(pool)
        self._free_slots = list(range(config.max_num_seqs))  # a heap
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return bool(self.num_running or self.num_waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that have none, the preempted ones among them."""
        return len(self.waiting)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, with `max_tokens` lowered to what `max_model_len` leaves it.

        Raises:
            ValueError: it could never run; nothing has changed then.
        """
        self.config.check_sequence(seq, self.pool)
        seq.max_tokens = min(seq.max_tokens, self.config.max_model_len - seq.num_prompt)
        seq.max_computed = seq.num_prompt + max(seq.max_tokens - 1, 0)
        seq.rank = rank(self.config.policy, seq, self._num_added)
        self._num_added += 1
        self.waiting.add(seq)

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step.

        Each sequence in decode keeps one token of the budget, so that no prefill stalls it; what
        is left goes to the prefill chunks of running sequences and then to admissions (Orca,
        OSDI '22; stall-free batching of Sarathi-Serve, OSDI '24).  When pages run out, the least
        senior running sequence yields its own and is recomputed later (vLLM, SOSP '23, section
        4.5).  The most senior one therefore advances in every step, so all finish.

        Call it with at most one earlier plan, empty or not, that is not updated yet.
        """
        entries: list[ScheduledTokens] = []
        preempted: list[Sequence] = []
        in_decode = [seq.in_decode for seq in self.running]
        prefill_budget = min(
            self.config.token_budget - sum(in_decode), self.config.max_prefill_tokens
        )

        # Most senior first.  Whoever yields is the last of the queue, so it is never one that the
        # plan has already, and the loop ends before it.
        for seq, decodes in zip(self.running, in_decode, strict=False):
            count = 1 if decodes else min(seq.num_prefill, prefill_budget)
            if count > 0 and (entry := self._take(seq, count, preempted)):
                entries.append(entry)
                prefill_budget -= 0 if decodes else count
        num_continued = len(entries)

        # Whoever joined after a preemption would take the pages that were missing.
        while prefill_budget > 0 and not preempted and (entry := self._admit(prefill_budget)):
            entries.append(entry)
            prefill_budget -= entry.count

        admitted = tuple(entry.seq for entry in entries[num_continued:])
        return StepPlan(tuple(entries), admitted, tuple(preempted))

    def update(
        self,
        plan: StepPlan,
        sampled: abc.Sequence[int],
        failed: abc.Collection[int] = (),
    ) -> Update:
        """Record the results of a plan; plans are updated in the order they were scheduled.

        A sequence that was preempted after the plan was made keeps its sampled token.  One that
        has finished by now does not: the result of its entry is discarded.

        Args:
            plan: what `schedule` returned.
            sampled: a token per entry of the plan; any number where the entry does not sample.
            failed: entries whose logits were not finite.  Their sequences end with "error".
        """
        accepted: list[int] = []
        finished: list[Sequence] = []
        for index, entry in enumerate(plan.entries):
            seq = entry.seq
            seq.num_in_flight -= entry.samples
            if seq.finish_reason is not None:
                continue
            if index in failed:
                reason: FinishReason | None = FinishReason.ERROR
            else:
                reason = self._record(entry, sampled[index])
                if entry.samples:
                    accepted.append(index)
            if reason is not None:
                self.finish(seq, reason)
                finished.append(seq)
        return Update(tuple(accepted), tuple(finished))

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence that was added, whatever its state; one that has ended stays as it is.

        Its slot and pages are free at once, even with a step in flight that computes it: that
        step comes before any other that uses them.
        """
        if seq.finish_reason is not None:
            return
        if seq.status is Status.RUNNING:
            self._vacate(seq)
        else:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason

    def abort(self, seq: Sequence) -> None:
        """End a sequence because nobody wants it any more."""
        self.finish(seq, FinishReason.ABORT)

    def reset_prefix_cache(self) -> None:
        """Forget the content of all pages, as new weights require.

        Running sequences go on with what they have computed, so the pages that they fill from
        now on are a mixture and are not kept either.
        """
        self._prefix_cache.clear()
        for seq in self.running:
            seq.keeps_pages = False

    def check(self) -> None:
        """Assert what must hold between any two calls; linear in pages and sequences."""
        running, waiting = list(self.running), list(self.waiting)
        self.pool.check(seq.block_table for seq in running)
        slots = self._free_slots + [seq.slot for seq in running if seq.slot is not None]
        assert sorted(slots) == list(range(self.config.max_num_seqs)), f"slots {slots}"
        for queue in (running, waiting):
            ranks = [seq.rank for seq in queue]
            assert ranks == sorted(set(ranks)), f"ranks {ranks}"
        for seq in running:
            assert seq.status is Status.RUNNING
            assert 0 <= seq.num_in_flight <= seq.num_tokens
            assert 0 < seq.num_computed <= seq.num_tokens
            assert self.pool.num_missing(seq.block_table, seq.num_computed) == 0
        for seq in waiting:
            assert seq.status in (Status.WAITING, Status.PREEMPTED)
            assert seq.slot is None
            assert not seq.block_table
            assert seq.num_computed == 0

    def _take(self, seq: Sequence, count: int, preempted: list[Sequence]) -> ScheduledTokens | None:
        """Plan `count` tokens of a running sequence; None if it had to yield instead."""
        num_missing = self.pool.num_missing(seq.block_table, seq.num_computed + count)
        if num_missing > 0 and not self._make_room(seq, num_missing, preempted):
            return None
        return self._advance(seq, count, num_missing)

    def _make_room(self, seq: Sequence, num_pages: int, preempted: list[Sequence]) -> bool:
        """Preempt until `num_pages` are free; False if `seq` itself was the last to ask."""
        while num_pages > self.pool.num_free:
            victim = self.running.last
            self._preempt(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _advance(self, seq: Sequence, count: int, num_new_pages: int) -> ScheduledTokens:
        """Plan the next `count` tokens of a sequence and count them as computed."""
        assert seq.slot is not None
        start, first_new_page = seq.num_computed, len(seq.block_table)
        new_pages: tuple[int, ...] = ()
        if num_new_pages > 0:
            new_pages = tuple(self.pool.allocate(num_new_pages))
            seq.block_table.extend(new_pages)
        is_decode = start >= seq.prefill_end
        samples = start + count >= seq.prefill_end and seq.max_tokens > 0
        seq.num_computed += count
        seq.num_in_flight += samples
        return ScheduledTokens(
            seq, seq.slot, start, count, samples, is_decode, first_new_page, new_pages
        )

    def _admit(self, prefill_budget: int) -> ScheduledTokens | None:
        """Let the most senior waiting sequence run; None if it must wait, and the others too."""
        num_slots = len(self._free_slots)
        may_admit = self._admission.may_admit(self.num_running, self.num_waiting, num_slots)
        if not may_admit or num_slots == 0 or self.num_waiting == 0:
            return None
        seq = self.waiting.first
        if seq.num_in_flight > 0:
            return None  # preempted just now: its last token is not known yet
        hits = self._prefix_cache.match(seq) if self._reads_cache(seq) else []
        if not self._fits_now(seq, hits, prefill_budget):
            return None
        self._place(seq, hits)
        count = min(seq.num_prefill, prefill_budget)
        num_missing = self.pool.num_missing(seq.block_table, seq.num_computed + count)
        return self._advance(seq, count, num_missing)

    def _reads_cache(self, seq: Sequence) -> bool:
        return self.config.enable_prefix_caching and seq.reads_prefix_cache

    def _fits_now(self, seq: Sequence, hits: list[int], prefill_budget: int) -> bool:
        """Whether there are pages for all its tokens, even if this step computes only a chunk.

        Where budget is left, all running sequences have the pages of their prefills: no free page
        is counted on twice, and nobody is admitted only to be preempted in the middle of one.
        """
        num_pending = seq.num_tokens - len(hits) * self.pool.page_size
        if not self.config.enable_chunked_prefill and num_pending > prefill_budget:
            return False
        num_missing = self.pool.num_missing(hits, seq.num_tokens)
        return num_missing <= self.pool.num_free_beside(hits)

    def _place(self, seq: Sequence, hits: list[int]) -> None:
        """Give a waiting sequence a slot and the pages of its cached prefix."""
        self.waiting.remove(seq)
        self.pool.share(hits)
        seq.block_table += hits
        seq.num_computed = len(hits) * self.pool.page_size
        seq.prefill_end = len(seq.token_ids)
        seq.keeps_pages = self.config.enable_prefix_caching
        if seq.status is Status.WAITING and self._reads_cache(seq):
            seq.num_cached = seq.num_computed
            self.stats.prefix_query_tokens += seq.num_tokens
            self.stats.prefix_hit_tokens += seq.num_cached
        seq.slot = heapq.heappop(self._free_slots)
        seq.status = Status.RUNNING
        self.running.add(seq)
        self._admission.on_admitted()

    def _preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to wait, to be recomputed but for what stays cached."""
        self._vacate(seq)
        seq.status = Status.PREEMPTED
        seq.num_preemptions += 1
        self.stats.num_preemptions += 1
        self.waiting.add(seq)

    def _vacate(self, seq: Sequence) -> None:
        """Take slot and pages from a running sequence."""
        assert seq.slot is not None
        self.running.remove(seq)
        heapq.heappush(self._free_slots, seq.slot)
        self.pool.release(seq.block_table)
        seq.slot = None
        seq.keeps_pages = False
        seq.block_table.clear()
        seq.num_computed = 0

    def _record(self, entry: ScheduledTokens, token: int) -> FinishReason | None:
        """Record the result of one entry; why it ends its sequence, or None if it does not."""
        seq, end = entry.seq, entry.start + entry.count
        if seq.keeps_pages:
            self._prefix_cache.keep(seq, entry.start, end)
        if entry.samples:
            assert len(seq.token_ids) == end, "plans were not updated in order"
            seq.token_ids.append(token)
            if token in seq.stop_ids and seq.num_output >= seq.min_tokens:
                seq.stop_token = token
                return FinishReason.STOP
        return FinishReason.LENGTH if end == seq.max_computed else None

"""Iteration-level scheduler: which tokens of which sequences the next step computes.

Knows counts of tokens, slots and pages.  Knows no model, no array and no device, and the time only
from the clock it is given, so that a simulator can drive it in virtual time exactly as an engine
does in real time.
"""

from __future__ import annotations

from collections import abc

from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.fair_share import FairQueue
from scheduler.latency import LatencyBound, Unbounded
from scheduler.plan import ScheduledTokens, StepPlan, Update
from scheduler.policy import AdmissionPolicy, Continuous, precedence
from scheduler.queues import RankHeap, WaitingQueue
from scheduler.residents import Residents, SchedulerStats
from scheduler.sequence import FinishReason, Sequence, Status
from scheduler.step_time import StepCost
from scheduler.swap_space import SwapSpace


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
        swap_space: SwapSpace | None = None,
        *,
        clock: abc.Callable[[], float] | None = None,
        cost: StepCost | None = None,
    ) -> None:
        """Start idle.

        Args:
            config: limits of a step and of a sequence.
            pool: the pages, all free; the scheduler is their only owner.
            admission: when waiting sequences may join; `Continuous` if absent.
            swap_space: where the pages of preempted sequences may be kept; nowhere if absent.
            clock: the time in seconds, for the ageing of priorities; real or virtual.
            cost: a model of step times, for the latency bounds.

        Raises:
            ValueError: a sequence of `max_model_len` would not fit the pool even alone, or the
                configuration needs a clock or a cost that is absent.
        """
        config.check_pool(pool)
        config.check_helpers(has_clock=clock is not None, has_cost=cost is not None)
        self.config = config
        self.pool = pool
        self.waiting: WaitingQueue = FairQueue() if config.fair_share else RankHeap()
        self.stats = SchedulerStats()
        self._admission = Continuous() if admission is None else admission
        space = SwapSpace(0) if swap_space is None else swap_space
        self._residents = Residents(config, pool, self.waiting, space, self.stats)
        self.running = self._residents.running
        self._clock = clock or _no_time
        self._bound = _latency_bound(config, cost)
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

    @property
    def wait_s(self) -> float:
        """Seconds that an empty plan is worth waiting, for the window of a dynamic batch to pass.

        0.0 unless sequences wait and none runs.
        """
        return self._admission.wait_s if self.num_waiting and not self.num_running else 0.0

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, with `max_tokens` lowered to what `max_model_len` leaves it.

        Raises:
            ValueError: it could never run; nothing has changed then.
        """
        self.config.check_sequence(seq, self.pool)
        seq.max_tokens = min(seq.max_tokens, self.config.max_model_len - seq.num_prompt)
        seq.max_computed = seq.num_prompt + max(seq.max_tokens - 1, 0)
        config = self.config
        first = precedence(config.policy, seq, self._clock(), config.priority_ageing_s)
        seq.rank = (first, 1, self._num_added)
        self._num_added += 1
        self.waiting.add(seq)

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step.

        Each sequence in decode keeps one token of the budget, so that no prefill stalls it; what
        is left goes to the prefill chunks of running sequences and then to admissions (Orca,
        OSDI '22; stall-free batching of Sarathi-Serve, OSDI '24).  When pages run out, the least
        senior running sequence yields its own and is recomputed later (vLLM, SOSP '23, section
        4.5).  The most senior one therefore advances in every step, so all finish.

        Where all that runs decodes and nothing that waits could join, the plan may have several
        steps, which the device runs by itself.

        Without mixed steps the prefills come first and the decodes wait, until all slots are in
        use or nothing that waits could join.  A latency bound makes chunks and batch smaller.

        Call it with at most one earlier plan, empty or not, that is not updated yet.
        """
        residents = self._residents
        in_decode = [seq.in_decode for seq in self.running]
        num_steps = self._num_steps(in_decode)
        budget = self._prefill_budget(sum(in_decode))
        num_decode_steps = num_steps if self.config.mixed else 0
        entries, budget = self._continue(in_decode, num_decode_steps, budget)
        num_continued = len(entries)

        # Whoever joined after a preemption would take the pages that were missing.
        while budget > 0 and not residents.any_preempted and (entry := self._admit(budget)):
            entries.append(entry)
            budget -= entry.count
        admitted = tuple(entry.seq for entry in entries[num_continued:])

        if not entries and not self.config.mixed:
            in_decode = [seq.in_decode for seq in self.running]
            entries, _ = self._continue(in_decode, num_steps, 0)
        moves = residents.moves()
        for _ in moves.preempted:
            self._admission.on_preempted()
        return StepPlan(
            tuple(entries),
            admitted,
            tuple(moves.preempted),
            num_steps,
            tuple(moves.swapped_out),
            tuple(moves.swapped_in),
        )

    def update(
        self,
        plan: StepPlan,
        sampled: abc.Sequence[abc.Sequence[int]],
        failed: abc.Collection[int] = (),
        complete: abc.Collection[int] = (),
    ) -> Update:
        """Record the results of a plan; plans are updated in the order they were scheduled.

        A sequence that was preempted after the plan was made keeps its sampled tokens.  One that
        has finished by now does not: the results of its entry are discarded, and so is what was
        sampled after a token that ends its sequence.

        Args:
            plan: what `schedule` returned.
            sampled: the tokens that each entry of the plan sampled, in order; fewer than it asked
                for if one of them ended the sequence, none if it had ended before.
            failed: entries that cannot go on after the tokens that they sampled, as their logits
                were not finite.  Their sequences end with "error".
            complete: entries after whose tokens nothing may follow.  Their sequences end with
                "stop".
        """
        self._bound.saw(plan)
        accepted: list[tuple[int, int]] = []
        finished: list[Sequence] = []
        for index, (entry, tokens) in enumerate(zip(plan.entries, sampled, strict=True)):
            seq = entry.seq
            seq.num_in_flight -= entry.num_samples
            if seq.finish_reason is not None:
                self.stats.discarded_tokens += len(tokens)
                continue
            num_before = len(seq.token_ids)
            reason = self._record(entry, tokens, failed=index in failed, complete=index in complete)
            if num_taken := len(seq.token_ids) - num_before:
                accepted.append((index, num_taken))
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
            self._residents.vacate(seq)
        else:
            self._residents.drop(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason

    def cut(self, seq: Sequence, count: int) -> None:
        """End a sequence before its newest `count` output tokens.

        For what the caller finds in its text, with the reason "stop".  That outranks the reason
        for which it may have finished meanwhile: the token it was found in came first, or says it.
        """
        assert 0 <= count <= seq.num_output
        self.finish(seq, FinishReason.STOP)
        seq.finish_reason, seq.stop_token = FinishReason.STOP, None
        del seq.token_ids[len(seq.token_ids) - count :]
        self.stats.discarded_tokens += count

    def abort(self, seq: Sequence) -> None:
        """End a sequence because nobody wants it any more."""
        self.finish(seq, FinishReason.ABORT)

    def reset_prefix_cache(self) -> None:
        """Forget the content of all pages, as new weights require."""
        self._residents.forget_content()

    def check(self) -> None:
        """Assert what must hold between any two calls; linear in pages and sequences."""
        for queue in (self.running, self.waiting):
            ranks = [seq.rank for seq in queue]
            assert ranks == sorted(set(ranks)), f"ranks {ranks}"
        self.waiting.check()
        self._residents.check()

    def _prefill_budget(self, num_decodes: int) -> int:
        """Most prompt tokens of the next step."""
        config = self.config
        rows, num_waiting = (num_decodes, 0) if config.mixed else (0, num_decodes)
        most = min(config.token_budget - rows, config.max_prefill_tokens)
        nobody_prefills = num_decodes == self.num_running and not (
            self.num_waiting and self._residents.num_free_slots
        )
        if nobody_prefills:
            return most
        return self._bound.max_chunk(rows, num_waiting, self.running, most)

    def _continue(
        self,
        in_decode: abc.Sequence[bool],
        num_steps: int,
        prefill_budget: int,
    ) -> tuple[list[ScheduledTokens], int]:
        """Plan the running sequences: the entries, and what is left of the budget.

        Most senior first.  Whoever yields is the last of the queue, so it is never one that the
        plan has already, and the loop ends before it.
        """
        entries: list[ScheduledTokens] = []
        for seq, decodes in zip(self.running, in_decode, strict=False):
            count = (
                min(num_steps, seq.num_left) if decodes else min(seq.num_prefill, prefill_budget)
            )
            if count > 0 and (entry := self._residents.take(seq, count)):
                entries.append(entry)
                prefill_budget -= 0 if decodes else count
        return entries, prefill_budget

    def _num_steps(self, in_decode: abc.Sequence[bool]) -> int:
        """Steps of the next plan.

        More than one only where no step could admit or prefill.  More than half of the rows take
        part in each of them: when most have ended by length, a smaller batch is cheaper.  The
        pages of all steps are allocated beforehand, and nobody is preempted for them.
        """
        if self.config.multi_step == 1 or any(seq.single_step for seq in self.running):
            return 1
        seqs = [seq for seq in self.running if seq.num_left > 0]
        if not seqs or len(seqs) > sum(in_decode):
            return 1
        lefts = sorted((seq.num_left for seq in seqs), reverse=True)
        most = lefts[len(lefts) // 2]
        if self.num_waiting > 0:
            most = lefts[-1] if self._slots_stay_taken(seqs) else 1
        num_steps = min(self.config.multi_step, most)
        num_steps = self._bound.max_steps(len(seqs), self.running, num_steps)
        while num_steps > 1 and self._residents.num_missing(num_steps) > self.pool.num_free:
            num_steps -= 1
        return num_steps

    def _slots_stay_taken(self, seqs: abc.Sequence[Sequence]) -> bool:
        """Whether all slots are in use, by sequences that nothing can end before their length."""
        all_run = len(seqs) == self.config.max_num_seqs
        return all_run and not any(seq.stop_ids or seq.text_may_end for seq in seqs)

    def _admit(self, prefill_budget: int) -> ScheduledTokens | None:
        """Let the most senior waiting sequence run; None if it must wait, and the others too."""
        residents, num_slots = self._residents, self._residents.num_free_slots
        may_admit = self._admission.may_admit(self.num_running, self.num_waiting, num_slots)
        if not may_admit or num_slots == 0 or self.num_waiting == 0:
            return None
        seq = self.waiting.first
        if seq.num_in_flight > 0:
            return None  # preempted just now: its last token is not known yet
        hits = residents.match(seq)
        fits = residents.fits(seq, hits, prefill_budget)
        if not fits or not self._bound.may_join(seq, self.running):
            return None
        is_new = seq.status is Status.WAITING
        residents.place(seq, hits)
        self._admission.on_admitted()
        if is_new:
            self.waiting.serve(seq.key, seq.num_prompt - seq.num_computed, 0)
        count = min(seq.num_prefill, prefill_budget)
        num_missing = self.pool.num_missing(seq.block_table, seq.num_computed + count)
        return residents.advance(seq, count, num_missing)

    def _record(
        self,
        entry: ScheduledTokens,
        tokens: abc.Sequence[int],
        *,
        failed: bool,
        complete: bool,
    ) -> FinishReason | None:
        """Record the results of one entry; why it ends its sequence, or None if it does not."""
        seq = entry.seq
        if entry.is_decode:
            assert len(seq.token_ids) == entry.start + 1, "plans were not updated in order"
            ends = self._append(seq, tokens)
            end = len(seq.token_ids) - 1  # computed: all but the token sampled last
        else:
            assert not entry.samples or len(seq.token_ids) == entry.end, "plans not in order"
            ends = self._append(seq, tokens)
            end = entry.start if failed else entry.end
        self._residents.keep(seq, entry.start, end)
        if ends or failed or complete:
            return FinishReason.ERROR if failed and not ends else FinishReason.STOP
        assert len(tokens) == entry.num_samples, "the device ended what the host does not"
        return FinishReason.LENGTH if end == seq.max_computed else None

    def _append(self, seq: Sequence, tokens: abc.Sequence[int]) -> bool:
        """Append sampled tokens, up to one that ends the sequence; whether there is one."""
        for num_taken, token in enumerate(tokens, 1):
            seq.token_ids.append(token)
            if token in seq.stop_ids and seq.num_output >= seq.min_tokens:
                seq.stop_token = token
                self.stats.discarded_tokens += len(tokens) - num_taken
                return True
        return False


def _no_time() -> float:
    return 0.0


def _latency_bound(config: SchedulerConfig, cost: StepCost | None) -> LatencyBound | Unbounded:
    if cost is None or (config.target_ttft_s is None and config.target_tpot_s is None):
        return Unbounded()
    return LatencyBound(cost, config.target_tpot_s, config.target_ttft_s, config.min_prefill_tokens)

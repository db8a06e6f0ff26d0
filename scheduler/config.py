"""Limits of a step and of a sequence, and the refusal of what could never keep them.

Knows numbers only: every `ValueError` of the package that a caller can meet is raised here or by
the block pool, with the value, the bound and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from scheduler.block_pool import BlockPool
from scheduler.policy import Policy
from scheduler.sequence import Sequence
from scheduler.swap import Preemption


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a sequence.

    Raises:
        ValueError: a limit is out of range, naming it, its value and the bound.
    """

    max_num_seqs: int
    """Slots: sequences that run at once."""
    token_budget: int
    """Most tokens one step computes, decodes and prefill chunks together."""
    max_prefill_tokens: int
    """Most tokens of the prefill chunks of one step, all together."""
    max_model_len: int
    """Most tokens of a sequence, prompt and output."""
    policy: Policy = "fcfs"
    """Seniority: first come, first served, or by priority first."""
    priority_ageing_s: float | None = None
    """Seconds of waiting that count as one level of priority; priorities do not age if absent."""
    fair_share: bool = False
    """Among those that wait, the key that was served least is next; `policy` orders its own."""
    mixed: bool = True
    """Prefill chunks and decodes in one step.  If not, decodes wait while prefills pend."""
    min_prefill_tokens: int = 1
    """Tokens of prefill chunks that a step may have whatever the latency bounds say."""
    target_ttft_s: float | None = None
    """Bound on the time to the first token; none if absent."""
    target_tpot_s: float | None = None
    """Bound on the time per output token; none if absent."""
    enable_chunked_prefill: bool = True
    """Split prompts over steps.  If not, a sequence waits for a step that can take all of it."""
    enable_prefix_caching: bool = True
    """Reuse the pages of a shared prefix."""
    preemption: Preemption = "recompute"
    """What becomes of a preempted sequence's pages."""
    page_cost_tokens: float = 0.0
    """Tokens that are computed in the time in which one page travels to the host and back."""
    multi_step: int = 1
    """Most steps of one plan, where all that runs decodes and nothing that waits could join."""

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy={self.policy!r} is not one of {', '.join(get_args(Policy))}")
        if self.preemption not in get_args(Preemption):
            choices = ", ".join(get_args(Preemption))
            raise ValueError(f"preemption={self.preemption!r} is not one of {choices}")
        if self.priority_ageing_s is not None and self.policy != "priority":
            raise ValueError(
                f"priority_ageing_s={self.priority_ageing_s} needs policy='priority', not "
                f"{self.policy!r}"
            )
        for name in ("priority_ageing_s", "target_ttft_s", "target_tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive; leave it out for none")
        if self.multi_step < 1:
            raise ValueError(f"multi_step={self.multi_step} must be at least 1; 1 turns it off")
        if self.max_num_seqs < 1 or self.max_model_len < 1:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} and max_model_len={self.max_model_len} must be "
                "at least 1"
            )
        if self.token_budget < self.max_num_seqs:
            raise ValueError(
                f"token_budget={self.token_budget} cannot give each of max_num_seqs="
                f"{self.max_num_seqs} its one token of a decode step; raise it or lower "
                "max_num_seqs"
            )
        if not 1 <= self.max_prefill_tokens <= self.token_budget:
            raise ValueError(
                f"max_prefill_tokens={self.max_prefill_tokens} must be from 1 to token_budget="
                f"{self.token_budget}"
            )
        if not 1 <= self.min_prefill_tokens <= self.max_prefill_tokens:
            raise ValueError(
                f"min_prefill_tokens={self.min_prefill_tokens} must be from 1 to "
                f"max_prefill_tokens={self.max_prefill_tokens}"
            )
        if not self.enable_chunked_prefill and self.max_prefill_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill max_prefill_tokens={self.max_prefill_tokens} must be at "
                f"least max_model_len={self.max_model_len}, or the longest prompts never run; "
                "raise it, lower max_model_len or enable chunked prefill"
            )

    def check_pool(self, pool: BlockPool) -> None:
        """Check that a sequence of `max_model_len` fits the pool, if it has it for itself.

        Raises:
            ValueError: it does not, so that it could never finish.
        """
        # The last output token is never computed: nothing follows it.
        if self.max_model_len - 1 > pool.capacity:
            raise ValueError(
                f"max_model_len={self.max_model_len} needs {self.max_model_len - 1} positions of "
                f"the KV cache, which has {pool.capacity} in {pool.num_pages - 1} pages of "
                f"{pool.page_size}; lower max_model_len to {pool.capacity + 1} or add pages"
            )

    def check_helpers(self, *, has_clock: bool, has_cost: bool) -> None:
        """Check that the scheduler was given what its policies need.

        Raises:
            ValueError: priorities age without a clock, or a latency bound has no model of times.
        """
        if self.priority_ageing_s is not None and not has_clock:
            raise ValueError(
                f"priority_ageing_s={self.priority_ageing_s} needs a clock; give the scheduler one"
            )
        for name in ("target_ttft_s", "target_tpot_s"):
            if getattr(self, name) is not None and not has_cost:
                raise ValueError(
                    f"{name}={getattr(self, name)} needs a model of step times; give the scheduler "
                    "a cost, such as FittedCost"
                )

    def check_sequence(self, seq: Sequence, pool: BlockPool) -> None:
        """Check that a sequence can run, if only for one output token.

        Raises:
            ValueError: it never can.
        """
        name = f"sequence {seq.seq_id!r}"
        prompt = f"{name} has a prompt of {seq.num_prompt} tokens"
        excess = seq.num_prompt - self.max_model_len
        if seq.num_prompt == 0:
            raise ValueError(f"{name} has an empty prompt; give it at least one token")
        if seq.max_tokens < 0:
            raise ValueError(f"{name} has max_tokens={seq.max_tokens}; it must be at least 0")
        if excess > 0:
            raise ValueError(
                f"{prompt}, above max_model_len={self.max_model_len}; shorten it by {excess} or "
                "raise max_model_len"
            )
        if excess == 0 and seq.max_tokens > 0:
            raise ValueError(
                f"{prompt}, which leaves no room for an output token within max_model_len="
                f"{self.max_model_len}; shorten it or raise max_model_len"
            )
        if seq.num_prompt > pool.capacity:
            raise ValueError(
                f"{prompt}, and the KV cache holds {pool.capacity}; shorten it or add pages"
            )

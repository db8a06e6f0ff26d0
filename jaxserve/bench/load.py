"""What is asked of a server, and when: the same load for an engine and for the simulator.

Knows lengths and seconds.  Does not know who serves.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from jaxserve.bench.throughput import WorkloadRequest
from scheduler.trace import Arrival, Arrivals, Listed

Encode = Callable[[str], Sequence[int]]


class Users:
    """A closed loop of given requests: each user asks again as soon as he is answered."""

    def __init__(self, arrivals: Iterable[Arrival], num_users: int) -> None:
        """All users ask at second 0.

        Args:
            arrivals: what is asked, in this order; their times do not matter.
            num_users: requests in the system at once, at most.
        """
        self._left = deque(arrivals)
        self._num_free = num_users

    def due(self, now_s: float) -> list[Arrival]:
        """A request of every user who waits for no answer."""
        count = min(self._num_free, len(self._left))
        self._num_free -= count
        return [replace(self._left.popleft(), time_s=now_s) for _ in range(count)]

    def next_s(self) -> float | None:
        """Not known: when somebody is answered."""
        return None

    def on_finish(self, arrival: Arrival, now_s: float) -> None:
        """The user is free to ask."""
        self._num_free += 1


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with their token ids, and the rule of their arrival."""

    arrivals: tuple[Arrival, ...]
    closed_loop: bool = False
    """As many users as slots, so that nothing ever queues; the times are ignored."""

    def source(self, num_slots: int) -> Arrivals:
        """The load as it arrives, from second 0."""
        return Users(self.arrivals, num_slots) if self.closed_loop else Listed(self.arrivals)


def make_load(
    requests: Sequence[WorkloadRequest],
    encode: Encode | None,
    *,
    request_rate: float | None = None,
    closed_loop: bool = False,
    seed: int = 0,
) -> Load:
    """Requests with times of arrival: all at once, at a rate, or one for one.

    Args:
        requests: in the order of their arrival.
        encode: text to token ids; None if there is no tokenizer.
        request_rate: mean arrivals per second of a Poisson process.
        closed_loop: each slot has a user.
        seed: of the arrivals.

    Raises:
        ValueError: a prompt is text and there is no tokenizer, or both rules are given.
    """
    if request_rate is not None and closed_loop:
        raise ValueError(
            f"request_rate={request_rate:g} says when requests arrive, and so does a closed loop; "
            "give one of the two"
        )
    rng, now_s = random.Random(seed), 0.0
    arrivals = []
    for number, request in enumerate(requests):
        now_s += rng.expovariate(request_rate) if request_rate is not None else 0.0
        token_ids = _token_ids(number, request, encode)
        arrivals.append(
            Arrival(now_s, len(token_ids), max(request.max_tokens, 1), token_ids=token_ids)
        )
    return Load(tuple(arrivals), closed_loop)


def _token_ids(number: int, request: WorkloadRequest, encode: Encode | None) -> tuple[int, ...]:
    if request.prompt_token_ids is not None:
        return tuple(request.prompt_token_ids)
    if encode is None:
        raise ValueError(
            f"request {number} of the workload has a text, and the simulator has no tokenizer; "
            "give prompt_token_ids"
        )
    return tuple(encode(request.prompt or ""))


def synthetic(
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    length_spread: float,
    vocab_size: int,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Requests of random tokens.

    Args:
        num_requests: how many.
        prompt_tokens: mean length of a prompt.
        output_tokens: mean length of an answer.
        length_spread: lengths are uniform in mean * (1 - spread) to mean * (1 + spread).
        vocab_size: token ids are below this.
        seed: of all random choices.

    Raises:
        ValueError: the spread is not in [0, 1).
    """
    if not 0 <= length_spread < 1:
        raise ValueError(f"length_spread={length_spread} must be at least 0 and below 1")
    rng = random.Random(seed)

    def length(mean: int) -> int:
        few, many = round(mean * (1 - length_spread)), round(mean * (1 + length_spread))
        return max(rng.randint(few, many), 1)

    return [
        WorkloadRequest(
            prompt_token_ids=[rng.randrange(vocab_size) for _ in range(length(prompt_tokens))],
            max_tokens=length(output_tokens),
        )
        for _ in range(num_requests)
    ]

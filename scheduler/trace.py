"""Arrival traces: what is asked, and when, for a simulator or a load generator.

Knows times and lengths.  All that is random comes from a seed.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Length = Callable[[random.Random], int]
"""Draws a number of tokens."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Raises:
        ValueError: a value is out of range, naming it.
    """

    time_s: float
    """When it arrives, in seconds from the start."""
    num_prompt: int
    num_output: int
    """Output tokens that it gets."""
    priority: int = 0
    key: str = ""
    """User or tenant."""
    token_ids: tuple[int, ...] | None = None
    """The prompt, if it matters for the prefix cache; shared with no other if absent."""
    max_tokens: int | None = None
    """For a request that a token may end: the limit that it asked for.  If that is above
    `num_output`, the last token is such a one.  Absent, it ends by its length, as known ahead."""

    def __post_init__(self) -> None:
        if not self.time_s >= 0:
            raise ValueError(f"time_s={self.time_s} must be at least 0")
        if self.num_prompt < 1 or self.num_output < 1:
            raise ValueError(
                f"num_prompt={self.num_prompt} and num_output={self.num_output} must be at least 1"
            )
        if self.token_ids is not None and len(self.token_ids) != self.num_prompt:
            raise ValueError(
                f"num_prompt={self.num_prompt}, but there are {len(self.token_ids)} token_ids"
            )
        if self.max_tokens is not None and self.max_tokens < self.num_output:
            raise ValueError(
                f"num_output={self.num_output} is above max_tokens={self.max_tokens}; raise it"
            )


class Arrivals(Protocol):
    """Requests as they come, for a simulator that asks in every turn of its loop."""

    def due(self, now_s: float) -> Sequence[Arrival]:
        """Those that have arrived by now and were not handed out before; asked once a turn."""
        ...

    def next_s(self) -> float | None:
        """When the next arrives; None if that is not known, or none is left."""
        ...

    def on_finish(self, arrival: Arrival, now_s: float) -> None:
        """One of them has got its last token."""
        ...


class Listed:
    """Arrivals at given times."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        """Hand them out in order of time, equal times in the order given."""
        self._left = deque(sorted(arrivals, key=lambda arrival: arrival.time_s))

    def due(self, now_s: float) -> list[Arrival]:
        """Those up to `now_s`."""
        due = []
        while self._left and self._left[0].time_s <= now_s:
            due.append(self._left.popleft())
        return due

    def next_s(self) -> float | None:
        """The time of the first that is left."""
        return self._left[0].time_s if self._left else None

    def on_finish(self, arrival: Arrival, now_s: float) -> None:
        """Arrivals do not depend on service."""


class ClosedLoop:
    """A fixed number of users, each of whom asks again some time after the answer."""

    def __init__(
        self,
        num_requests: int,
        num_users: int,
        *,
        prompt: Length,
        output: Length,
        think_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        """All users ask at second 0.

        Args:
            num_requests: of all users together.
            num_users: requests in the system at once, at most.
            prompt: draws prompt lengths.
            output: draws output lengths.
            think_s: seconds from an answer to the user's next request.
            seed: of the lengths.

        Raises:
            ValueError: a number is out of range.
        """
        _check_positive(num_requests=num_requests, num_users=num_users)
        if not think_s >= 0:
            raise ValueError(f"think_s={think_s} must be at least 0")
        self._random = random.Random(seed)
        self._prompt, self._output = prompt, output
        self._think_s = think_s
        self._num_left = num_requests
        self._asks = [(0.0, user) for user in range(min(num_users, num_requests))]  # a heap
        self._user_of: dict[int, int] = {}

    def due(self, now_s: float) -> list[Arrival]:
        """One request of each user whose time has come."""
        due = []
        while self._asks and self._num_left > 0 and self._asks[0][0] <= now_s:
            time_s, user = heapq.heappop(self._asks)
            self._num_left -= 1
            num_prompt, num_output = self._prompt(self._random), self._output(self._random)
            arrival = Arrival(time_s, num_prompt, num_output, key=f"user-{user}")
            self._user_of[id(arrival)] = user
            due.append(arrival)
        return due

    def next_s(self) -> float | None:
        """When the next user asks, as far as it is known."""
        return self._asks[0][0] if self._asks and self._num_left > 0 else None

    def on_finish(self, arrival: Arrival, now_s: float) -> None:
        """The user thinks, and asks again."""
        heapq.heappush(self._asks, (now_s + self._think_s, self._user_of.pop(id(arrival))))


def at_once(num_requests: int, *, prompt: Length, output: Length, seed: int = 0) -> list[Arrival]:
    """All requests at second 0."""
    _check_positive(num_requests=num_requests)
    rng = random.Random(seed)
    return [Arrival(0.0, prompt(rng), output(rng)) for _ in range(num_requests)]


def poisson(
    num_requests: int, rate: float, *, prompt: Length, output: Length, seed: int = 0
) -> list[Arrival]:
    """Independent arrivals: exponential gaps.

    Args:
        num_requests: how many.
        rate: mean arrivals per second.
        prompt: draws prompt lengths.
        output: draws output lengths.
        seed: of times and lengths.

    Raises:
        ValueError: a number is not positive.
    """
    return gamma(num_requests, rate, cv=1.0, prompt=prompt, output=output, seed=seed)


def gamma(
    num_requests: int, rate: float, *, cv: float, prompt: Length, output: Length, seed: int = 0
) -> list[Arrival]:
    """Arrivals in bursts: Gamma-distributed gaps.

    Args:
        num_requests: how many.
        rate: mean arrivals per second.
        cv: standard deviation of the gaps over their mean; 1 is Poisson, above it they come in
            bursts, below it more evenly.
        prompt: draws prompt lengths.
        output: draws output lengths.
        seed: of times and lengths.

    Raises:
        ValueError: a number is not positive.
    """
    _check_positive(num_requests=num_requests, rate=rate, cv=cv)
    rng = random.Random(seed)
    shape = cv**-2
    now_s = 0.0
    arrivals = []
    for _ in range(num_requests):
        now_s += rng.gammavariate(shape, 1 / (shape * rate))
        arrivals.append(Arrival(now_s, prompt(rng), output(rng)))
    return arrivals


def read_jsonl(path: str | Path) -> list[Arrival]:
    """Read a trace: a JSON object per line with the fields of `Arrival`.

    `num_prompt` may be left out where there are `token_ids`.

    Raises:
        ValueError: a line is not an arrival, naming it.
        OSError: the file cannot be read.
    """
    arrivals = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                arrivals.append(_arrival(json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{str(path)!r}, line {number}: {error}") from error
    if not arrivals:
        raise ValueError(f"{str(path)!r} has no arrivals")
    return arrivals


def _arrival(values: Any) -> Arrival:
    if not isinstance(values, dict):
        raise ValueError(f"not a JSON object: {values!r}")
    token_ids = values.get("token_ids")
    if token_ids is not None:
        values = {"num_prompt": len(token_ids)} | values | {"token_ids": tuple(token_ids)}
    return Arrival(**values)


def fixed(num_tokens: int) -> Length:
    """Always so many."""
    _check_positive(num_tokens=num_tokens)
    return lambda rng: num_tokens


def uniform(least: int, most: int) -> Length:
    """Any number from `least` to `most`, all equally likely."""
    _check_positive(least=least)
    if most < least:
        raise ValueError(f"lengths of {least} to {most} tokens: the first must be the smaller")
    return lambda rng: rng.randint(least, most)


def pareto(least: int, most: int, alpha: float) -> Length:
    """Heavy-tailed: P(length > x) falls as x ** -alpha from `least` on; cut off at `most`."""
    _check_positive(least=least, alpha=alpha)
    if most < least:
        raise ValueError(f"lengths of {least} to {most} tokens: the first must be the smaller")
    return lambda rng: min(int(least * rng.paretovariate(alpha)), most)


def parse_length(text: str) -> Length:
    """Lengths from "100", "80-120" (uniform) or "20-2000:1.2" (Pareto with that exponent).

    Raises:
        ValueError: it is none of these.
    """
    spread, _, alpha = text.partition(":")
    least, dash, most = spread.partition("-")
    try:
        if alpha:
            return pareto(int(least), int(most), float(alpha))
        return uniform(int(least), int(most)) if dash else fixed(int(least))
    except ValueError as error:
        raise ValueError(
            f"{text!r} is not a length such as 100, 80-120 or 20-2000:1.2 ({error})"
        ) from error


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive")

"""What a load generator asks a server: random prompts, shared prefixes, or a file's.

Knows prompts as text, token ids or messages.  Does not know who serves, or when it is asked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night
point home water room mother area money story fact month lot right study book eye job word business
issue side kind head house service friend father power hour game line end member law car city
"""
WORDS = tuple(_WORDS.split())
"""Words of one token in most vocabularies, for servers whose vocabulary is not known."""
CHARACTERS_PER_TOKEN = 4
"""About so many, for answers in a file that has texts only."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: one of the three forms of a prompt, and how long the answer may be."""

    max_tokens: int
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None

    def body(self, *, is_chat: bool) -> dict[str, Any]:
        """The fields of an OpenAI body that say it.

        Raises:
            ValueError: the endpoint cannot be asked this.
        """
        if not is_chat:
            if self.messages is not None:
                raise ValueError("the requests are messages; give --endpoint chat")
            prompt = self.prompt if self.prompt_token_ids is None else list(self.prompt_token_ids)
            return {"prompt": prompt, "max_tokens": self.max_tokens}
        if self.prompt_token_ids is not None:
            raise ValueError("the requests are token ids; give --endpoint completions")
        messages = self.messages or ({"role": "user", "content": self.prompt},)
        return {"messages": list(messages), "max_completion_tokens": self.max_tokens}


@dataclass(frozen=True, kw_only=True)
class RandomData:
    """Random prompts, some of which may begin alike.

    Raises:
        ValueError: a number is out of range.
    """

    num_requests: int
    prompt_tokens: int
    """Mean length of a prompt, beside its prefix."""
    output_tokens: int
    """Mean length of an answer."""
    length_spread: float = 0.0
    """Lengths are uniform in mean * (1 - spread) to mean * (1 + spread)."""
    prefix_tokens: int = 0
    """Length of the shared prefixes."""
    num_prefixes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.length_spread < 1:
            raise ValueError(f"length_spread={self.length_spread} must be at least 0 and below 1")
        for name in ("num_requests", "prompt_tokens", "output_tokens", "num_prefixes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.prefix_tokens < 0:
            raise ValueError(f"prefix_tokens={self.prefix_tokens} must be at least 0")

    def asks(self, vocab_size: int | None, run: int = 0) -> list[Ask]:
        """The requests: token ids below `vocab_size`, or words where that is not known.

        Args:
            vocab_size: of the model.
            run: other contents for each run, in the same lengths, so that no run finds prompts of
                another one in the prefix cache.
        """
        lengths = random.Random(self.seed)
        contents = random.Random(f"{self.seed}/{run}")
        units = WORDS if vocab_size is None else range(vocab_size)
        prefixes = [contents.choices(units, k=self.prefix_tokens) for _ in range(self.num_prefixes)]

        def length(mean: int) -> int:
            few, many = (round(mean * (1 + sign * self.length_spread)) for sign in (-1, 1))
            return max(lengths.randint(few, many), 1)

        made = []
        for _ in range(self.num_requests):
            num_prompt, num_output = length(self.prompt_tokens), length(self.output_tokens)
            parts = [*contents.choice(prefixes), *contents.choices(units, k=num_prompt)]
            made.append(_ask(parts, num_output))
        return made


def _ask(parts: Sequence[Any], max_tokens: int) -> Ask:
    if isinstance(parts[0], str):
        return Ask(max_tokens, prompt=" ".join(parts))
    return Ask(max_tokens, prompt_token_ids=tuple(parts))


class _Turn(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from", default="")


class _Entry(msgspec.Struct):
    """A request of a file, in any of the forms it may have."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    conversations: list[_Turn] | None = None
    max_tokens: int | None = None

    def ask(self, output_tokens: int) -> Ask:
        given = (self.prompt, self.prompt_token_ids, self.messages, self.conversations)
        if sum(one is not None for one in given) != 1:
            raise ValueError("give one of prompt, prompt_token_ids, messages and conversations")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.conversations is not None:
            return self._first_turn(self.conversations)
        return Ask(
            self.max_tokens or output_tokens,
            prompt=self.prompt,
            prompt_token_ids=None
            if self.prompt_token_ids is None
            else tuple(self.prompt_token_ids),
            messages=None if self.messages is None else tuple(self.messages),
        )

    def _first_turn(self, turns: list[_Turn]) -> Ask:
        """ShareGPT's form: the first turn asks, and the second says how long its answer was."""
        if len(turns) < 2:
            raise ValueError("conversations has fewer than two turns")
        answer = len(turns[1].value) // CHARACTERS_PER_TOKEN
        return Ask(self.max_tokens or max(answer, 1), prompt=turns[0].value)


def read_asks(
    path: str | Path, num_requests: int | None = None, *, output_tokens: int = 64
) -> list[Ask]:
    """Read a file of requests: a JSON list, or a JSON object per line.

    An object has `prompt`, `prompt_token_ids`, `messages`, or ShareGPT's `conversations` of two
    turns or more (shorter ones are left out), and may have `max_tokens`.

    Args:
        path: of the file.
        num_requests: only the first so many.
        output_tokens: `max_tokens` of those that name none.

    Raises:
        ValueError: it is no such file, naming the entry, or has fewer requests.
        OSError: it cannot be read.
    """
    asks = []
    for number, entry in _entries(Path(path)):
        if entry.conversations is not None and len(entry.conversations) < 2:
            continue
        try:
            asks.append(entry.ask(output_tokens))
        except ValueError as error:
            raise ValueError(f"{str(path)!r}, request {number}: {error}") from error
    if not asks:
        raise ValueError(f"{str(path)!r} has no requests")
    if num_requests is not None and num_requests > len(asks):
        raise ValueError(f"num_prompts={num_requests}, but {str(path)!r} has {len(asks)} requests")
    return asks[:num_requests]


def _entries(path: Path) -> list[tuple[int, _Entry]]:
    content = path.read_bytes()
    try:
        if content.lstrip().startswith(b"["):
            return list(enumerate(msgspec.json.decode(content, type=list[_Entry])))
        lines = [line for line in content.splitlines() if line.strip()]
        return [(n, msgspec.json.decode(line, type=_Entry)) for n, line in enumerate(lines)]
    except msgspec.DecodeError as error:
        raise ValueError(f"{str(path)!r} is not a file of requests: {error}") from error

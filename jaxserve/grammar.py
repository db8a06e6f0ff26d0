"""Constraints on text to grammars over a model's tokens, through llguidance.

Knows the tokenizer's vocabulary.  Does not know sequences, steps or the device.
llguidance (https://github.com/guidance-ai/llguidance) parses with an Earley parser over a lexer of
regular-expression derivatives, so that a mask costs microseconds and nothing is precomputed.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from jaxserve.json_schema import WHITESPACE, enforceable
from jaxserve.special_text import with_unwritable_names
from jaxserve.structured import StructuredOutputsParams
from jaxserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MOST_KEPT = 128
"""Compiled grammars that are kept for requests to come."""
STANDS_FOR_END = "<|end of text that the model does not have|>"
Slices = tuple[str, ...]
_IN_STRING = r"[^\"\\\x00-\x1F\x7F]"
JSON_SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_STRING}{{1,{longest}}}" for longest in (2, 4, 6, 8, 11, 16)),
    f"{_IN_STRING}+",
)
"""Parts of the vocabulary of which llguidance finds out at once whether all of it may follow.

Its own have strings of at most 10 and 30 characters.  Shorter ones save a third of a mask's time in
strings of bounded length, and cost nothing elsewhere.
"""
WORD_SLICES = (
    *(f"[a-z][a-z]{{0,{longest - 1}}}" for longest in (3, 6, 9)),
    *(f" [a-z][a-z]{{0,{longest - 1}}}" for longest in (4, 9)),
    "[A-Za-z ]{1,16}",
)
"""The same for expressions: words, beginnings of words, and words after a space.

An expression has no strings of "anything" in which those of JSON could help.  Letters are written
apart from their repetition because llguidance looks for a slice within a part of a sequence only
in that form.  Measured on eight expressions of words, names, addresses and sentences: masks take
0.3 to 1.2 of the time, 0.7 where words are counted.
"""
_OF_WORDS = frozenset({"regex", "choice"})
"""Kinds of constraints that are expressions; a grammar may have JSON in it."""


class Grammars:
    """Matchers for constraints; may be used from several threads.

    Args:
        tokenizer: the model's.
        vocab_size: of the model, which may have more ids than the tokenizer.
        end_ids: tokens that end a text, allowed wherever the constraint is fulfilled.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self.has_end = bool(end_ids)
        """Whether there are such tokens."""
        self.end_ids = sorted(end_ids) or [tokenizer.vocab_size]
        """These tokens, or one that stands for them in masks and that no model knows."""
        self.num_ids = max(vocab_size, self.end_ids[-1] + 1)
        """Ids of a mask."""
        self._lock = threading.Lock()
        self._vocabularies: dict[Slices, llguidance.LLTokenizer] = {}
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def compile(self, constraint: StructuredOutputsParams) -> llguidance.LLMatcher:
        """A matcher at the beginning of its text, of which each sample needs a copy.

        It takes a second for a large constraint, unless that is kept.

        Raises:
            ValueError: the schema, expression or grammar is not valid, or uses what is not
                supported; with llguidance's reason.
        """
        text = grammar_text(constraint)
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
        made = self._compile(text, constraint)
        with self._lock:
            self._kept[text] = made
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made

    def load(self) -> None:
        """Read the vocabulary, which the first constraint of a kind would else wait for."""
        self._tokens(JSON_SLICES)
        self._tokens(WORD_SLICES)

    def _compile(self, text: str, constraint: StructuredOutputsParams) -> llguidance.LLMatcher:
        import llguidance

        slices = WORD_SLICES if constraint.kind in _OF_WORDS else JSON_SLICES
        matcher = llguidance.LLMatcher(self._tokens(slices), text, log_level=0)
        tried = _tried(matcher)
        if tried.is_error():
            reason = why(tried.get_error())
            raise ValueError(f"structured_outputs.{constraint.kind} cannot be followed: {reason}")
        return matcher

    def _tokens(self, slices: Slices) -> llguidance.LLTokenizer:
        import llguidance

        with self._lock:
            known = self._vocabularies
            if slices not in known and known:
                known[slices] = next(iter(known.values())).with_slices(list(slices))
            elif slices not in known:
                known[slices] = llguidance.LLTokenizer(
                    self._vocabulary_text(),
                    n_vocab=self.num_ids,
                    eos_token=self.end_ids,
                    slices=list(slices),
                )
            return known[slices]

    def _vocabulary_text(self) -> str:
        """The tokenizer's JSON.

        Added tokens have other names there: llguidance would else force such a token where the
        constraint has its letters.  Grammars name them by their ids, as in `<[5]>`.
        """
        backend = self._tokenizer.backend
        if not self.has_end:
            backend = tokenizers.Tokenizer.from_str(backend.to_str())
            backend.add_special_tokens([STANDS_FOR_END])
        return with_unwritable_names(backend)


def _tried(matcher: llguidance.LLMatcher) -> llguidance.LLMatcher:
    """A copy that has taken a token: some of what is too complex shows only then."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.unpackbits(bits, bitorder="little").nonzero()[0]
    copy = matcher.deep_copy()
    if not copy.is_error() and len(allowed) > 0:
        copy.consume_token(int(allowed[-1]))
        copy.compute_bitmask()
    return copy


def why(error: str) -> str:
    """llguidance's reason, without the dump of its state and of the grammar."""
    if "NoExtensionBias" in error:
        return "no text fits it"
    return " ".join(error.partition("<state>")[0].partition("<grammar>")[0].split())[:500]


def grammar_text(constraint: StructuredOutputsParams) -> str:
    """A constraint in llguidance's own notation.

    Raises:
        ValueError: a schema that is not JSON, or not an object.
    """
    import llguidance

    if constraint.choice is not None:
        # Alternatives of an expression, and not of a grammar: there may be any number of them, and
        # masks of 1,500 take a third of the time.
        return llguidance.grammar_from("regex", "|".join(map(re.escape, constraint.choice)))
    if constraint.regex is not None:
        return llguidance.grammar_from("regex", constraint.regex)
    if constraint.grammar is not None:
        try:
            return llguidance.grammar_from("grammar", constraint.grammar)
        except Exception as error:  # its converter of GBNF raises what it likes
            raise ValueError(f"structured_outputs.grammar cannot be read: {error}") from error
    schema = _schema(constraint)
    try:
        allowed = enforceable(schema, whitespace_pattern=WHITESPACE)
        return llguidance.LLMatcher.grammar_from_json_schema(allowed)
    except RecursionError:
        raise ValueError("structured_outputs.json is nested too deeply to be enforced") from None
    except ValueError as error:  # an integer beyond 64 bits
        raise ValueError(f"structured_outputs.json cannot be read: {error}") from error


def _schema(constraint: StructuredOutputsParams) -> dict[str, Any]:
    if constraint.json_object:
        return {"type": "object"}
    schema: Any = constraint.json
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError(f"structured_outputs.json is not JSON: {error}") from error
    if not hasattr(schema, "keys"):
        raise ValueError(f"structured_outputs.json={schema!r} must be a JSON schema, an object")
    return dict(schema)

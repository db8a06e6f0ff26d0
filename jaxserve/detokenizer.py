"""Text of one sample, token by token: whole characters only.

Knows that a character may span tokens and that the prompt decides the first space.  Does not know
stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from jaxserve.tokenizer import Tokenizer

_CONTEXT = 8
"""Prompt tokens the first output is decoded after: enough to hold a character's bytes."""
_MAX_PENDING = 32
"""Tokens without a whole character after which their bytes are given up as invalid."""
_TAIL = 3
"""Bytes of the longest unfinished UTF-8 character: the newest tokens are never given up."""
_INVALID = "\ufffd"


class Detokenizer:
    """Decodes a growing sequence of tokens.

    Text is given out once it is certain: the bytes of an unfinished character are held back.
    The concatenation of what `push` and `flush` return is the text; for byte-level vocabularies
    it equals `Tokenizer.decode` of the output, for SentencePiece ones it keeps the first space.

    Args:
        tokenizer: the model's.
        prompt_ids: what precedes the output; only the last few matter.
        skip_special_tokens: leave control tokens out of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context = self._usable(list(prompt_ids[-_CONTEXT:]))
        self._pending: list[int] = []
        self._restart()

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now, possibly none."""
        if self._skip and token_id in self._tokenizer.special_ids:
            return ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # the new token changed how the ones before it decode
            return self._give_up(len(self._pending))
        if text is not None:
            self._context, self._pending = self._pending, []
            return str(text)
        if len(self._pending) > _MAX_PENDING:
            return self._give_up(len(self._pending) - _TAIL)
        return ""

    def flush(self) -> str:
        """Return what is held back, invalid bytes as U+FFFD: no more tokens follow."""
        return self._give_up(len(self._pending)) if self._pending else ""

    def _give_up(self, count: int) -> str:
        """Decode the first pending tokens as they are, and go on after them."""
        given, kept = self._pending[:count], self._pending[count:]
        before, after = self._decode(self._context), self._decode(self._context + given)
        text = after[len(before) :] if after.startswith(before) else self._decode(given)
        self._context = self._usable(given) or self._context
        self._pending = []
        self._restart()
        return text + "".join(self.push(token_id) for token_id in kept)

    def _restart(self) -> None:
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)

    def _usable(self, ids: list[int]) -> list[int]:
        """The tokens, if their text is whole: output cannot be told from half a character."""
        return [] if self._decode(ids).endswith(_INVALID) else ids

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
